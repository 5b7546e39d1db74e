"""Swish becomes Hard Swish, gates of a normalised value hard sigmoid; nothing else changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import loka_compile
from loka_compile.kernels.block_norm import block_norm_ref
from loka_compile.passes.block_norm import BlockNorm
from loka_compile.passes.hard_swish import HardSwish

MODS = [BlockNorm(), HardSwish()]


def test_swish(capture, close):
    captured = capture(lambda x: F.silu(x) + x * torch.sigmoid(x), MODS)
    x = torch.randn(50) * 4
    close(captured(x), 2 * F.hardswish(x))
    assert len(captured.notes("changes", "hard_swish")) == 2


def test_inplace_swish_that_others_see(capture, close):
    captured = capture(lambda x: (F.silu(x, inplace=True), x * 1)[1], MODS)
    x = torch.randn(50)
    want = F.hardswish(x)
    close(captured(x), want)
    close(x, want)


@pytest.mark.parametrize(
    "gate",
    [
        lambda x, n: x * torch.sigmoid(n(x)),
        lambda x, n: torch.sigmoid(n(x)) * x,
        lambda x, n: n(x.double()).sigmoid().float() * x,
        lambda x, n: torch.mul(x, torch.sigmoid(n(x))),
    ],
)
def test_gate(gate, capture, close):
    def norm(v):
        return F.rms_norm(v, (8,), None, 1e-5)

    captured = capture(lambda x: gate(x, norm), MODS)
    x = 3 * torch.randn(5, 8)
    close(captured(x), x * F.hardsigmoid(block_norm_ref(x, None, 8, 1e-5)))
    assert captured.count(torch.sigmoid) == 0


@pytest.mark.parametrize(
    "forward",
    [
        lambda x, n: torch.sigmoid(x),
        lambda x, n: torch.sigmoid(n(x)),
        lambda x, n: (x + 1) * torch.sigmoid(n(x)),
        lambda x, n: x * (s := torch.sigmoid(n(x))) + s,
        lambda x, n: F.gelu(x) + F.relu(x) + torch.tanh(x) + F.hardswish(x) + F.hardsigmoid(x),
    ],
)
def test_the_rest_stays(forward, capture, close):
    norm = nn.RMSNorm(8)
    captured = capture(lambda x: forward(x, norm), MODS)
    x = torch.randn(5, 8)
    close(captured(x), forward(x, norm))
    assert captured.notes("changes", "hard_swish") == []


def test_a_pattern_says_the_same(capture, close):
    """The one Mod that the pattern API can express gives the same graph either way."""

    @loka_compile.pattern(example=lambda: (torch.randn(4, 8),))
    def swish(x):
        return F.silu(x)

    @swish.replace
    def _(x):
        return F.hardswish(x)

    layers = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8), nn.SiLU())
    x, texts = torch.randn(4, 8), []
    for one in (HardSwish(), swish.as_pass()):
        captured = capture(layers, [one])
        close(captured(x), F.hardswish(layers[2](F.hardswish(layers[0](x)))))
        texts.append([(n.op, n.target) for n in captured.after[0].graph.nodes])
        assert len(captured.notes("changes")) == 2
    assert texts[0] == texts[1]
