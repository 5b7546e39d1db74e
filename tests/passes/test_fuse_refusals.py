"""linear -> block_norm chains that are left apart, each with its reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from chain_models import LINEAR
from chain_models import Chain
from chain_models import K
from chain_models import N
from chain_models import reference
from torch import nn

from loka_compile.passes.block_norm import BLOCK_NORM
from loka_compile.passes.fuse import FUSED


def test_active_dropout_between(capture):
    captured = capture(Chain(act=nn.SiLU(), between=nn.Dropout(0.5)).train(), "mods")
    captured(torch.randn(4, K))
    assert captured.count(FUSED) == 0
    assert captured.count(F.dropout) == 1
    assert "active dropout" in captured.refusals("fuse")


def test_dropout_vanishes_in_eval(capture, agree, quick):
    quick = type(quick)(quick.shape, quick.precision, False)
    model = Chain(act=nn.SiLU(), between=nn.Dropout(0.5)).eval()
    captured = capture(model, "mods")
    agree(captured, model, reference(F.hardswish), quick, K)
    assert captured.count(FUSED) == 1
    assert captured.count(F.dropout) == 0


def test_batch_norm_in_training_is_left(capture, close):
    model = Chain(nn.BatchNorm1d(N), nn.ReLU()).train()
    eager = Chain(nn.BatchNorm1d(N), nn.ReLU()).train()
    captured = capture(model, "mods")
    x = torch.randn(16, K)
    # Batch statistics subtract the linear's bias again, so stripping it changes no value.
    close(captured(x), eager(x))
    assert captured.count(FUSED, BLOCK_NORM) == 0
    assert captured.count(F.batch_norm) == 1
    assert "statistics of the batch" in captured.refusals("fuse")


class Dice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(N)
        self.alpha = nn.Parameter(torch.zeros(N))

    def forward(self, x):
        p = torch.sigmoid(self.bn(x))
        return p * x + (1 - p) * self.alpha * x


@pytest.mark.parametrize(("act", "why"), [(nn.PReLU(), "PReLU"), (Dice(), "batch_norm")])
def test_activations_with_state_stay(act, why, capture):
    captured = capture(Chain(nn.Identity(), act).train(), "mods")
    captured(torch.randn(8, K))
    assert captured.count(FUSED) == 0
    assert why in captured.refusals("fuse")


def test_prelu_behind_a_norm_stays_an_op(capture, agree, quick):
    act = nn.PReLU()
    model = Chain(act=act).train(quick.train)
    captured = capture(model, "mods")
    agree(captured, model, reference(act), quick, K)
    assert captured.count(FUSED) == 1
    assert "PReLU" in captured.refusals("fuse")


def test_weight_norm_is_refused(capture):
    model = Chain(act=nn.SiLU())
    nn.utils.parametrizations.weight_norm(model.linear)
    captured = capture(model, "mods")
    captured(torch.randn(4, K))
    assert captured.count(FUSED) == 0
    assert captured.count(BLOCK_NORM) == 1
    assert "weight is computed" in captured.refusals("fuse")


BETWEEN = {
    "broadcast": lambda model, x, r: model.norm(model.linear(x) + r[:1]),
    "scaled": lambda model, x, r: model.norm(torch.add(model.linear(x), r, alpha=2)),
    "wider": lambda model, x, r: model.norm(model.linear(x).half() + r).float(),
    "two sums": lambda model, x, r: model.norm(model.linear(x) + r + r.cos()),
    "gate over the sum": lambda model, x, r: (
        (z := model.linear(x) + r) * torch.sigmoid(model.norm(z))
    ),
    "gate beside the sum": lambda model, x, r: (
        (z := model.linear(x)) * torch.sigmoid(model.norm(z + r))
    ),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_sums_that_are_no_addend(name, capture, close):
    """Left apart, and with the values of their parts."""
    model = Chain(act=nn.SiLU())
    between = BETWEEN[name]
    captured = capture(lambda x, r: between(model, x, r), "exact")
    x, r = torch.randn(4, K), torch.randn(4, N)
    close(captured(x, r), between(model, x, r))
    captured = capture(lambda x, r: between(model, x, r), "mods")
    captured(x, r)
    assert captured.count(FUSED) == 0
    assert captured.refusals("fuse") or "not fused" in str(captured.notes("remarks", "fuse"))


def test_heads_are_never_fused(capture):
    captured = capture(Chain(act=nn.SiLU()), "mods", heads=["linear"])
    captured(torch.randn(4, K))
    assert captured.count(FUSED) == 0
    assert captured.nodes(LINEAR)[0].args[2] is not None
    assert "head" in captured.refusals("fuse")
