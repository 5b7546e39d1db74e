"""Last-dimension norms become block_norm with the right block, gain, eps and dtype."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from loka_compile.kernels.block_norm import block_norm_ref
from loka_compile.kernels.block_norm import block_of
from loka_compile.passes.block_norm import BLOCK_NORM
from loka_compile.passes.block_norm import BLOCK_NORMS
from loka_compile.passes.block_norm import EXACT_BLOCK_NORM
from loka_compile.passes.strip_bias import STRIP_BIAS

MODS = [STRIP_BIAS, BLOCK_NORMS]
EPS32 = torch.finfo(torch.float32).eps


def ready(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for p in norm.parameters():
        nn.init.normal_(p)
    return norm


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(12),
        nn.LayerNorm(12, eps=1e-2),
        nn.LayerNorm(12, elementwise_affine=False),
        nn.LayerNorm(300),
        nn.LayerNorm(384),
        nn.RMSNorm(512, eps=1e-3),
        nn.RMSNorm(12),
    ],
    ids=str,
)
def test_value_and_gradients(norm, quick, capture, agree):
    norm = ready(norm).train(quick.train)
    (features,) = norm.normalized_shape
    block = block_of(features)

    def ref(norm, x):
        eps = EPS32 if norm.eps is None else norm.eps
        return block_norm_ref(x, getattr(norm, "weight", None), block, eps)

    captured = capture(norm, MODS, block=block)
    agree(captured, norm, ref, quick, features)
    (node,) = captured.nodes(BLOCK_NORM)
    assert node.args[2] == block
    assert captured.count(F.layer_norm, torch.rms_norm) == 0
    kind = "rewrites" if isinstance(norm, nn.RMSNorm) and block == features else "changes"
    assert f"block_norm of {block}" in captured.notes(kind, "block_norm")[0]


@pytest.mark.parametrize(("block", "used"), [(4, 4), (8, 8), (100, 12), (5, 5)])
def test_block_option(block, used, capture, close):
    norm = ready(nn.LayerNorm(12))
    captured = capture(norm, MODS, block=block)
    x = torch.randn(3, 12)
    close(captured(x), block_norm_ref(x, norm.weight, used, norm.eps))
    assert captured.nodes(BLOCK_NORM)[0].args[2] == used


def test_several_dimensions_are_refused(capture, close):
    norm = ready(nn.LayerNorm((3, 12)))
    captured = capture(norm, [BLOCK_NORMS])
    x = torch.randn(2, 3, 12)
    close(captured(x), norm(x))
    assert "2 dimensions" in captured.refusals("block_norm")


def test_a_bias_that_stays_is_added_behind(capture, close):
    def forward(x, b):
        return F.layer_norm(x, (12,), None, b * 2, 1e-5)

    captured = capture(forward, MODS)
    x, b = torch.randn(3, 12), torch.randn(12)
    close(captured(x, b), block_norm_ref(x, None, 12, 1e-5) + b * 2)


def test_result_dtype_of_the_norm_is_kept(capture, close):
    """Where autocast returns a norm in another dtype than its input, so does the rewrite."""

    class Wider:
        name = "wider"

        def __call__(self, gm, context):
            for node in gm.graph.nodes:
                if node.target is F.layer_norm:
                    node.meta["example_value"] = node.meta["example_value"].float()

    norm = nn.LayerNorm(12).bfloat16()
    captured = capture(norm, [STRIP_BIAS, Wider(), BLOCK_NORMS])
    assert captured(torch.randn(3, 12, dtype=torch.bfloat16)).dtype == torch.float32


def test_exact_form_takes_only_what_is_exact(capture, close):
    norms = nn.ModuleList([nn.RMSNorm(12), nn.RMSNorm(300), nn.LayerNorm(12)])

    def forward(x, y):
        return norms[2](norms[0](x)), norms[1](y)

    captured = capture(forward, [EXACT_BLOCK_NORM], block=4)
    args = torch.randn(3, 12), torch.randn(3, 300)
    for got, want in zip(captured(*args), forward(*args), strict=True):
        close(got, want)
    assert captured.count(BLOCK_NORM) == 1
    assert captured.count(torch.rms_norm, F.layer_norm) == 2
    assert captured.notes("changes") == []
    assert "block_norm is off" in captured.refusals()


@pytest.mark.parametrize("passes", [MODS, [EXACT_BLOCK_NORM]], ids=["mods", "exact"])
def test_an_input_that_is_written_to_later_is_left(passes, capture, close):
    """Our op saves its input; a later write would make autograd refuse the whole graph."""

    def forward(x, before):
        y = x + 0.5
        if before:
            y.add_(1)
        h = F.rms_norm(y, (12,), None, 1e-5)
        if not before:
            y.view(-1)[:3].add_(0.25)
        return h, y

    for before in (False, True):
        captured = capture(lambda x, before=before: forward(x, before), passes, aot=True)
        mine = torch.randn(3, 12, requires_grad=before)
        for got, want in zip(captured(mine), forward(mine, before), strict=True):
            close(got, want)
        assert captured.count(BLOCK_NORM) == int(before)
        assert ("written to in place later" in captured.refusals()) is not before
