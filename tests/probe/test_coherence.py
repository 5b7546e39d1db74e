"""Coherence of a weight's gradient by hand, and what it does to the predicted error of wgrad."""

from __future__ import annotations

import torch

from loka_compile.probe import coherence as co
from loka_compile.probe import measures as ms
from loka_compile.probe import quantify as qt
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.statistics import update

ROWWISE = "torch:rowwise+emulated"


def test_by_hand() -> None:
    x = torch.ones(16, 4)
    same = torch.ones(16, 1)
    turning = same.clone()
    turning[::2] = -1
    gy = torch.cat([same, turning, torch.zeros(16, 1)], dim=1)
    got = co.coherence(gy.t() @ x, gy, x)
    # Equal summands: sqrt(M); cancelling ones and none at all: 0.
    torch.testing.assert_close(got, torch.tensor([4.0, 0.0, 0.0]))


def test_error_of_wgrad_is_that_of_the_whole_batch() -> None:
    """M = 4096 random signs with a drift of 0.1: 32 rows of a batch cannot know how it adds up."""
    x_held = Statistics.empty(64, torch.float32, torch.device("cpu"))
    g_held = Statistics.empty(32, torch.float32, torch.device("cpu"), gradient=True)
    zero, true = torch.zeros(()), []
    for step in range(12):
        x, gy = torch.randn(4096, 64), torch.randn(4096, 32)
        x += 1
        gy += 0.1
        if step < 8:
            update(x, x_held)
            update(gy, g_held)
            co.update(gy.t() @ x, gy, x, g_held)
        else:
            sample = qt.Sample(x, gy, zero, zero)
            true.append(ms.measure(*qt.run("wgrad", sample, torch.zeros(32, 64), ROWWISE)))
    want = sum(t["median_row"] for t in true) / len(true)
    w = torch.zeros(32, 64)
    got = qt.quantify("wgrad", ROWWISE, w, x_held, g_held, torch.float32)
    assert abs(got.median_row / want - 1) < 0.1
    blind = Statistics(g_held.rows, g_held.moments, g_held.scalars)
    off = qt.quantify("wgrad", ROWWISE, w, x_held, blind, torch.float32)
    assert off.median_row / want > 1.5
