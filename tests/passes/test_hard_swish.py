"""Swish becomes Hard Swish, gates of a normalised value hard sigmoid; nothing else changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from loka_compile.kernels.block_norm import block_norm_ref
from loka_compile.passes.block_norm import BLOCK_NORMS
from loka_compile.passes.hard_swish import HARD_SWISH

MODS = [BLOCK_NORMS, HARD_SWISH]


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
