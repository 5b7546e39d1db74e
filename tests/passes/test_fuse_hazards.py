"""What stands in the way of a fusion, or must survive it: readers, writes, casts, modes, bodies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from chain_models import EPS32
from chain_models import LINEAR
from chain_models import Chain
from chain_models import Grouped
from chain_models import K
from chain_models import N
from chain_models import linear_ref
from chain_models import norm_ref
from chain_models import reference
from torch import nn
from torch.utils.checkpoint import checkpoint

from loka_compile.passes.block_norm import BLOCK_NORM
from loka_compile.passes.fuse import FUSED


def test_other_readers_of_the_inner_value(capture, close):
    model = Chain(act=nn.Hardswish(), norm=nn.RMSNorm(N), bias=False)

    def forward(x):
        h = model.linear(x)
        return model.act(model.norm(h)), h.sum()

    captured = capture(forward, "mods")
    x = torch.randn(4, K)
    for got, want in zip(captured(x), forward(x), strict=True):
        close(got, want)
    assert captured.count(FUSED) == 0
    assert "other readers" in captured.refusals("fuse")


def test_norm_result_with_other_readers_fuses_without_the_activation(capture, close):
    model = Chain(act=nn.Hardswish(), norm=nn.RMSNorm(N), bias=False)

    def forward(x):
        h = model.norm(model.linear(x))
        return model.act(h), h.sum()

    captured = capture(forward, "mods")
    x = torch.randn(4, K)
    for got, want in zip(captured(x), forward(x), strict=True):
        close(got, want)
    assert captured.nodes(FUSED)[0].args[7] == "none"


def test_one_linear_called_twice(capture, close):
    """Fusion acts on call sites: only the second call of a shared layer has a norm behind it."""
    torch.manual_seed(0)
    linear, norm = nn.Linear(N, N, bias=False), nn.RMSNorm(N)

    def forward(x):
        h = linear(x)
        h = linear(h)
        return F.hardswish(norm(h))

    captured = capture(forward, "mods")
    x = torch.randn(4, N)
    close(captured(x), forward(x))
    assert (captured.count(LINEAR), captured.count(FUSED)) == (1, 1)


def test_write_to_the_input_in_between(capture, close):
    linear, norm = nn.Linear(N, N, bias=False), nn.RMSNorm(N)

    def forward(x):
        h = linear(x)
        x.mul_(2)
        return norm(h) + x

    captured = capture(forward, "mods")
    mine, theirs = torch.randn(4, N), None
    theirs = mine.clone()
    close(captured(mine), forward(theirs))
    close(mine, theirs)
    assert captured.count(FUSED) == 0
    assert "written to in place" in captured.refusals("fuse")


def test_write_through_a_view_in_between(capture, close):
    linear, norm = nn.Linear(N, N, bias=False), nn.RMSNorm(N)

    def forward(x):
        h = linear(x)
        x.view(-1)[3:9].zero_()
        return norm(h) + x

    captured = capture(forward, "mods")
    mine = torch.randn(4, N)
    theirs = mine.clone()
    close(captured(mine), forward(theirs))
    assert captured.count(FUSED) == 0


def test_gradient_mode_between(capture, close):
    linear, norm = nn.Linear(N, N, bias=False), nn.RMSNorm(N)

    def forward(x):
        with torch.no_grad():
            h = linear(x)
        return norm(h)

    captured = capture(forward, "mods")
    x = torch.randn(4, N, requires_grad=True)
    captured(x).sum().backward()
    assert x.grad is None
    assert linear.weight.grad is None
    assert norm.weight.grad is not None
    assert captured.count(FUSED) == 0


def test_rounding_cast_between_is_kept(capture, close):
    model = Chain(nn.RMSNorm(N), bias=False)

    def forward(x):
        return model.norm(model.linear(x).to(torch.bfloat16).to(torch.float32))

    captured = capture(forward, "mods")
    x = torch.randn(4, K)
    close(captured(x), forward(x))
    assert captured.count(FUSED) == 0
    assert "rounds" in captured.refusals("fuse")


def test_rounding_cast_behind_is_kept(capture, close):
    model = Chain(nn.RMSNorm(N), nn.Hardswish(), bias=False)

    def forward(x):
        return model.act(model.norm(model.linear(x)).to(torch.bfloat16))

    captured = capture(forward, "mods")
    x = torch.randn(4, K)
    assert torch.equal(captured(x), forward(x))
    assert captured.nodes(FUSED)[0].args[7] == "none"
    assert captured.count(F.hardswish) == 1


def test_frozen_and_tied_weights(capture, close):
    torch.manual_seed(0)
    linear, norm = nn.Linear(N, N, bias=False), nn.RMSNorm(N)
    linear.weight.requires_grad_(False)
    other = nn.Linear(N, N, bias=False)
    other.weight = linear.weight

    def forward(x):
        return F.hardswish(norm(other(F.hardswish(norm(linear(x))))))

    captured = capture(forward, "mods")
    x = torch.randn(4, N, requires_grad=True)
    got, want = captured(x), forward(x)
    close(got, want)
    (mine,) = torch.autograd.grad(got.square().sum(), x)
    (theirs,) = torch.autograd.grad(want.square().sum(), x)
    close(mine, theirs)
    assert captured.count(FUSED) == 2


def test_gain_that_is_computed_late(capture, close):
    """The op stands behind its last input, not where the linear stood."""
    linear = nn.Linear(K, N, bias=False)

    def forward(x, s):
        h = linear(x)
        gain = torch.ones(N) * s.exp().sum()
        return F.rms_norm(h, (N,), gain, 1e-5)

    captured = capture(forward, "mods")
    args = torch.randn(4, K), torch.randn(3)
    close(captured(*args), forward(*args))
    assert captured.count(FUSED) == 1


def test_checkpointed_body(capture, agree, quick):
    model = Chain(act=nn.SiLU()).train(quick.train)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x):
            return checkpoint(self.model, x, use_reentrant=False)

    captured = capture(Checkpointed(), "mods")
    agree(captured, model, reference(F.hardswish), quick, K)
    assert captured.count(FUSED) == 1
    assert captured.count(LINEAR, F.layer_norm, F.silu) == 0


def test_dynamic_batch(capture, close):
    model = Grouped(act=nn.SiLU())
    model.norm = nn.RMSNorm(8)
    captured = capture(model, "mods", dynamic=True)
    for batch in (3, 5, 9):
        x = torch.randn(batch, K)
        z = linear_ref(model, x).view(batch, 3, 8)
        close(captured(x), F.hardswish(norm_ref(z, model.norm, EPS32)))
    assert len(captured.after) == 1
    assert captured.count(FUSED) == 1


def test_autocast_inside_the_graph(capture, close):
    model = Chain(act=nn.SiLU())

    def forward(x):
        with torch.autocast("cpu", torch.bfloat16):
            h = model.linear(x)
        return model.act(model.norm(h.float()))

    captured = capture(forward, "mods")
    x = torch.randn(4, K)
    z = F.linear(x.bfloat16(), model.linear.weight.bfloat16()).float()
    want = F.hardswish(norm_ref(z, model.norm))
    close(captured(x), want, torch.bfloat16)
    assert captured.count(FUSED) == 1


def test_vmap_is_left_alone(capture, close):
    model = Chain(nn.RMSNorm(N), bias=False)

    def forward(x):
        return torch.vmap(lambda row: model.norm(model.linear(row)))(x)

    captured = capture(forward, "mods")
    x = torch.randn(4, K)
    close(captured(x), forward(x))
    assert captured.count(FUSED, BLOCK_NORM) == 0
