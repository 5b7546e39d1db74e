"""layer_norm and rms_norm with all arguments in place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

N = 12
RMS = torch.rms_norm


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(N),
        nn.LayerNorm(N, eps=1e-2),
        nn.LayerNorm(N, bias=False),
        nn.LayerNorm(N, elementwise_affine=False),
        nn.LayerNorm((3, N)),
        lambda x: F.layer_norm(x, [N]),
        lambda x: F.layer_norm(input=x, eps=0.1, normalized_shape=(N,)),
        lambda x: torch.layer_norm(x, (N,), None, None, 1e-3),
    ],
)
def test_layer_norm_spellings(norm, capture, close):
    captured = capture(norm)
    x = torch.randn(2, 3, N)
    close(captured(x), norm(x))
    (node,) = captured.nodes(F.layer_norm)
    assert len(node.args) == 5
    assert not node.kwargs
    assert isinstance(node.args[4], float)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_eps_none_is_resolved_as_torch_does(dtype, autocast, capture):
    x = torch.full((1, N), 1e-10 if dtype == torch.float64 else 1e-5, dtype=dtype)

    def forward(x):
        return F.rms_norm(x, (N,))

    captured = capture(forward)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got, want = captured(x), forward(x)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert captured.nodes(RMS)[0].args[3] == torch.finfo(wide).eps


def test_eps_that_is_a_graph_input_is_left(capture, close):
    model = nn.LayerNorm(N)
    captured = capture(model, "mods", dynamic=True)
    x = torch.randn(3, N)
    close(captured(x), model(x))
    assert "eps is a graph input" in captured.refusals("block_norm")


@pytest.mark.parametrize(
    "norm",
    [
        nn.GroupNorm(3, N),
        nn.GroupNorm(3, N, affine=False),
        lambda x: F.group_norm(x, eps=1e-2, num_groups=4),
    ],
)
def test_group_norm_spellings(norm, capture, close):
    captured = capture(norm)
    x = torch.randn(4, N)
    close(captured(x), norm(x))
    (node,) = captured.nodes(F.group_norm)
    assert len(node.args) == 5 and not node.kwargs
