"""The Triton record of a weight's gradient against its definitions; interpreted without a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from loka_compile.kernels import sketch as ks
from loka_compile.probe import coherence as co
from loka_compile.probe import sketch as sk
from loka_compile.probe import statistics
from loka_compile.probe.statistics import BATCHES
from loka_compile.probe.statistics import Statistics

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def both(
    shapes: list[tuple[int, int, int]], dtype: torch.dtype, awkward: bool, before: int = 0
) -> list[Statistics]:
    """By kernels and by definition; `before`: batches that came earlier."""
    held = [Statistics.empty(shapes[0][1], dtype, DEVICE, gradient=True) for _ in range(2)]
    for number, (m, n, k) in enumerate(shapes):
        gy = torch.randn(m, n, device=DEVICE) * torch.logspace(-30, 0, m, device=DEVICE)[:, None]
        x = torch.randn(k, m, device=DEVICE).t() * torch.logspace(-3, 3, k, device=DEVICE)
        if awkward:
            gy[:, 0] = 0
            x[0, k - 1] = math.nan if number % 2 else 0.0
        gy, x = gy.to(dtype), x.to(dtype)
        gw = gy.float().t() @ x.float()
        for one, update in zip(held, (co.record_kernels, co.record_ref), strict=True):
            one.scalars[BATCHES] = before + number + 1
            update(gw, gy, x, one.scalars, one.coherence, one.sketch, one.marks)
    return held


@pytest.mark.parametrize(
    ("shapes", "dtype", "awkward"),
    [
        ([(70, 40, 130), (33, 40, 130), (1, 40, 130)], torch.bfloat16, False),
        ([(40, 3, 5)] * 3, torch.float32, True),
        ([(300, 20, 1)], torch.float32, False),
        ([(9, 130, 1100)], torch.float16, True),
    ],
)
def test_equals_the_definitions(shapes, dtype, awkward) -> None:
    kernels, ref = both(shapes, dtype, awkward)
    torch.testing.assert_close(kernels.coherence, ref.coherence, rtol=1e-5, atol=0, equal_nan=True)
    torch.testing.assert_close(kernels.marks, ref.marks, rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(kernels.sketch, ref.sketch, rtol=0, atol=0, equal_nan=True)


def test_wide_gradients_keep_fewer_batches(monkeypatch) -> None:
    """Two gradients that Triton compiles one kernel for, but for the batches that they keep."""
    monkeypatch.setattr(statistics, "COHERENCE_SIZE", 80 * 48)
    kept = []
    for n in (16, 48):
        kernels, ref = both([(20, n, 8)] * 2, torch.float32, False, before=100)
        kept.append(ref.coherence.shape[0])
        torch.testing.assert_close(
            kernels.coherence, ref.coherence, rtol=1e-5, atol=0, equal_nan=True
        )
    assert kept == [240, 80]


def test_the_ring_turns(monkeypatch) -> None:
    """A short ring: later batches overwrite earlier ones, whole or in part."""
    monkeypatch.setattr(sk, "ROWS", 100)
    shapes = [(60, 4, 8), (30, 4, 8), (30, 4, 8), (120, 4, 8), (5, 4, 8)]
    kernels, ref = both(shapes, torch.float32, False)
    torch.testing.assert_close(kernels.marks, ref.marks, rtol=1e-6, atol=0)
    torch.testing.assert_close(kernels.sketch, ref.sketch, rtol=0, atol=0)
    assert ks.sketch is not None and [
        s.gy.shape[0] for s in sk.sketches(ref.sketch, ref.marks)
    ] == [5]
