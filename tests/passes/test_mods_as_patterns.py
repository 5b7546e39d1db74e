"""The Mods, said as patterns: the same graph where they fit; what a pattern cannot say is named.

The built-in Mods are passes all the same: `passes/registry.py` says why.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import loka_compile
from loka_compile.kernels.block_norm import block_of
from loka_compile.passes.block_norm import BlockNorm
from loka_compile.passes.hard_swish import HardSwish
from loka_compile.passes.strip_bias import StripBias

t = torch.randn
BLOCK_NORM = torch.ops.loka.block_norm


@loka_compile.pattern(example=lambda: (t(4, 8), t(6, 8), t(6)))
def biased(x, w, b):
    return F.linear(x, w, b)


@biased.replace
def _(x, w, b):
    return F.linear(x, w)


@biased.when
def _(match):
    return match.is_parameter("b") and not match.is_head


@loka_compile.pattern(example=lambda: (t(4, 8), t(8), t(8), 8, 1e-3), free=("n", "eps"))
def shifted_norm(x, w, b, n, eps):
    return F.layer_norm(x, (n,), w, b, eps)


@shifted_norm.replace
def _(x, w, b, n, eps):
    return F.layer_norm(x, (n,), w, None, eps)


@loka_compile.pattern(example=lambda: (t(4, 8), t(8), 8, 1e-3), free=("n", "eps"))
def mean_norm(x, w, n, eps):
    return F.layer_norm(x, (n,), w, None, eps)


@mean_norm.replace
def _(x, w, n, eps):
    return BLOCK_NORM(x, w, block_of(n), eps)[0]


@loka_compile.pattern(example=lambda: (t(4, 8),))
def swish(x):
    return F.silu(x)


@swish.replace
def _(x):
    return F.hardswish(x)


@loka_compile.pattern(example=lambda: (t(4, 96), t(96), 96, 1e-3), free=("block", "eps"))
def soft_gate(v, w, block, eps):
    return v * torch.sigmoid(BLOCK_NORM(v, w, block, eps)[0])


@soft_gate.replace
def _(v, w, block, eps):
    return v * F.hardsigmoid(BLOCK_NORM(v, w, block, eps)[0])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(8, 12), nn.LayerNorm(12)
        self.down, self.gate = nn.Linear(12, 300), nn.LayerNorm(300)
        self.head = nn.Linear(300, 1)

    def forward(self, x):
        y = self.down(F.silu(self.norm(self.up(x))))
        return self.head(y * torch.sigmoid(self.gate(y)))


def calls(captured):
    return [(n.op, str(n.target)) for n in captured.after[0].graph.nodes]


@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 8)])
def test_the_mods_said_as_patterns_give_the_same_graph(shape, capture, close):
    patterns = (biased, shifted_norm, mean_norm, swish, soft_gate)
    model, x, results = Model(), torch.randn(shape), []
    for passes in ([StripBias(), BlockNorm(), HardSwish()], [p.as_pass() for p in patterns]):
        captured = capture(model, passes, heads=["head"])
        results.append((captured(x), calls(captured)))
    (got, ours), (want, theirs) = results
    close(got, want)
    assert ours == theirs


def test_what_a_pattern_of_one_form_does_not_match(capture):
    """Each of these is a pattern of its own, or, where it writes in place, none; and one Mod."""
    wide = nn.LayerNorm(8)
    square = tuple(nn.LayerNorm((4, 8)).parameters())
    cases = {
        "cast": (lambda v: v * torch.sigmoid(BLOCK_NORM(v.double(), None, 8, 1e-5)[0]), soft_gate),
        "no gain": (lambda v: F.layer_norm(v, (8,)), mean_norm),
        "groups": (lambda v: F.group_norm(v, 2, wide.weight), mean_norm),
        "in place": (lambda v: (F.silu(v, inplace=True), v * 1)[1], swish),
        "two dimensions": (lambda v: F.layer_norm(v, (4, 8), *square), shifted_norm),
    }
    for forward, one in cases.values():
        captured = capture(forward, [one.as_pass()])
        captured(torch.randn(4, 8))
        assert captured.notes("changes") == []
        captured = capture(forward, [StripBias(), BlockNorm(), HardSwish()])
        captured(torch.randn(4, 8))
        assert captured.notes("changes")
