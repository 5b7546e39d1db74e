"""The reservoir of real rows: what it holds, how evenly, and that pairs stay pairs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loka_compile.probe import merge as mg
from loka_compile.probe import statistics as st
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.statistics import update


def observe(state: Statistics, *batches: Tensor) -> Statistics:
    for batch in batches:
        update(batch, state)
    return state


def fresh(features: int = 3, device="cpu") -> Statistics:
    return Statistics.empty(features, torch.float32, torch.device(device))


def _numbered(first: int, count: int, device="cpu") -> Tensor:
    """Rows that carry their own number, and its negative: mixed or made-up rows show."""
    number = torch.arange(first, first + count, dtype=torch.float32, device=device)
    return torch.stack([number, -number, number + 0.5], dim=1)


def test_reservoir_holds_real_rows_only(device):
    state, seen = fresh(3, device=device), 0
    for m in (3, 100, 1, 257, 40, 64) * 10:
        observe(state, _numbered(seen + 1, m, device))
        seen += m
    rows = state.reservoir()
    assert rows.shape == (st.RESERVOIR, 3)
    assert (rows[:, 1] == -rows[:, 0]).all() and (rows[:, 2] == rows[:, 0] + 0.5).all()
    assert (rows[:, 0] >= 1).all() and (rows[:, 0] <= seen).all()
    assert rows[:, 0].unique().numel() == st.RESERVOIR


def test_reservoir_is_roughly_uniform():
    """320 batches of 32 rows: each quarter of the stream fills about a quarter of the slots."""
    state = fresh(3)
    for i in range(320):
        observe(state, _numbered(32 * i, 32))
    number = state.reservoir()[:, 0]
    counts = torch.histc(number, bins=4, min=0, max=320 * 32)
    # Expected 64 each; one standard deviation is 7.
    assert (counts - 64).abs().max() < 28, counts


def test_rows_are_spread_over_a_long_batch():
    """32 of 3200 rows, from every part of the batch, not its head."""
    state = observe(fresh(3), _numbered(0, 3200))
    number = state.reservoir()[:, 0]
    assert number.numel() == st.ROWS_PER_BATCH
    assert torch.histc(number, bins=8, min=0, max=3200).min() == st.ROWS_PER_BATCH // 8


def test_input_and_gradient_stay_paired(device):
    """Also where one of the two is non-finite in rows where the other is not."""
    x, g, first = fresh(3, device=device), fresh(3, device=device), 0
    for step in range(60):
        m = (5, 90, 33)[step % 3]
        batch_x = _numbered(first, m, device)
        batch_g = batch_x.clone()
        if step % 4 == 0:
            batch_x[1] = math.nan
        if step % 5 == 0:
            batch_g[: m // 2] = math.inf
        observe(x, batch_x)
        observe(g, batch_g)
        first += m
    rows_x, rows_g = x.drawn(), g.drawn()
    both = (torch.isfinite(rows_x) & torch.isfinite(rows_g)).all(1)
    assert both.sum() > 100 and not both.all()
    torch.testing.assert_close(rows_x[both], rows_g[both], rtol=0, atol=0)
    merged_x, merged_g = mg.merge(x, x), mg.merge(g, g)
    both = (torch.isfinite(merged_x.drawn()) & torch.isfinite(merged_g.drawn())).all(1)
    torch.testing.assert_close(merged_x.drawn()[both], merged_g.drawn()[both], rtol=0, atol=0)


def test_deterministic(device):
    runs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        batches = [_numbered(9 * i, 70, device) for i in range(20)]
        runs.append(observe(fresh(3, device=device), *batches))
    # Not the last row: it is the bin, into which losing candidates race on a GPU.
    for a, b in zip(*((r.drawn(), r.moments, r.scalars) for r in runs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
