"""Row errors of a weight's gradient, predicted from sketches, against batches that nobody saw."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loka_compile.probe import coherence
from loka_compile.probe import measures as ms
from loka_compile.probe import quantify as qt
from loka_compile.probe import wgrad_error
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.statistics import update

N, K = 24, 80
CPU = torch.device("cpu")


def batch(m: int) -> tuple[Tensor, Tensor]:
    """Inputs around a common vector, in one of 8 kinds of equal rows each (so that rounding errors
    add up), with columns of very different sizes; an offset of gy differs by batch."""
    kinds = torch.randn(8, K, generator=torch.Generator().manual_seed(7))
    x = (1 + kinds[torch.randint(8, (m,))]) * torch.logspace(-3, 0, K)
    return x, torch.randn(m, N) + 0.3 * torch.randn(())


def observed(sizes: list[int]) -> tuple[Statistics, Statistics]:
    x_held = Statistics.empty(K, torch.float32, CPU)
    g_held = Statistics.empty(N, torch.float32, CPU, gradient=True)
    for m in sizes:
        x, gy = batch(m)
        update(x, x_held)
        update(gy, g_held)
        coherence.update(gy.t() @ x, gy, x, g_held)
    return x_held, g_held


def truth(kernel: str, batches: int, m: int) -> dict[str, float]:
    zero, w = torch.zeros(()), torch.zeros(N, K)
    found = [
        ms.measure(*qt.run("wgrad", qt.Sample(*batch(m), zero, zero), w, kernel))
        for _ in range(batches)
    ]
    return {k: sum(f[k] for f in found) / batches for k in ("median_row", "bad_rows")}


@pytest.mark.parametrize("kernel", ["torch:tensorwise+emulated", "torch:rowwise+emulated"])
def test_predicts_batches_that_were_not_seen(kernel: str) -> None:
    torch.manual_seed(0)
    x, gy = observed([512] * 160)
    true = truth(kernel, 160, 512)
    got = qt.quantify("wgrad", kernel, torch.zeros(N, K), x, gy, torch.float32)
    assert abs(got.median_row / true["median_row"] - 1) < 0.15
    assert abs(got.bad_rows - true["bad_rows"]) < 0.05
    assert got.median_row_lower < got.median_row < got.median_row_upper
    assert got.bad_rows_lower <= got.bad_rows <= got.bad_rows_upper
    # Sketches hold the newest 64 batches, coherences all of them.
    errors = wgrad_error.row_errors(kernel, gy, torch.float32)
    assert errors is not None and errors.shape == (160, N)


def test_rows_that_are_zero_have_no_error() -> None:
    x, gy = (
        Statistics.empty(K, torch.float32, CPU),
        Statistics.empty(N, torch.float32, CPU, gradient=True),
    )
    for _ in range(4):
        rows, gradient = batch(64)
        gradient[:, ::2] = 0
        update(rows, x)
        update(gradient, gy)
        gw = gradient.t() @ rows
        coherence.update(gw, gradient, rows, gy)
    errors = wgrad_error.row_errors("torch:rowwise+emulated", gy, torch.float32)
    assert errors is not None
    assert torch.isnan(errors[:, ::2]).all() and (errors[:, 1::2] > 0).all()


def test_without_a_sketch_there_is_no_prediction() -> None:
    gy = Statistics.empty(N, torch.float32, CPU, gradient=True)
    assert wgrad_error.row_errors("torch:rowwise+emulated", gy, torch.float32) is None
