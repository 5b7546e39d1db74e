"""The Triton update of the Probe's state against its definition; interpreted where no GPU is."""

from __future__ import annotations

import math

import pytest
import torch

from loka_compile.kernels.observe import observe
from loka_compile.probe import statistics as st
from loka_compile.probe.statistics import Statistics

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def kernel(x: torch.Tensor, wanted: torch.Tensor | None, held: Statistics) -> None:
    observe(x, wanted, *held.tensors, candidates=st.ROWS_PER_BATCH, weight=st.EW)


def awkward(m: int, c: int, dtype: torch.dtype) -> torch.Tensor:
    x = 1000 + torch.randn(m, c, device=DEVICE)
    x[:, 0] = 0.1
    if m > 4:
        x[1, c - 1] = math.nan
        x[2, 0] = -math.inf
        x[3] = 0
    return x.to(dtype)


def same(a: Statistics, b: Statistics) -> None:
    torch.testing.assert_close(a.drawn(), b.drawn(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(a.moments, b.moments, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(a.scalars, b.scalars, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("c", "sizes", "dtype", "masked"),
    [
        (130, (70, 1, 33), torch.bfloat16, False),
        # Long rows, and more partial sums of columns than are read at once.
        (300, (600, 9), torch.bfloat16, True),
        (1, (40, 3), torch.float32, True),
        (16, (90, 90, 90, 90, 90, 90, 90, 90, 90, 300), torch.float32, True),
        (20, (5,), torch.float64, False),
    ],
)
def test_equals_the_definition(c, sizes, dtype, masked) -> None:
    one, other = (Statistics.empty(c, dtype, DEVICE) for _ in range(2))
    for m in sizes:
        x = awkward(m, c, dtype)
        wanted = (torch.arange(m, device=DEVICE) % 3 != 0) if masked else None
        kernel(x, wanted, one)
        st.observe_ref(x, wanted, *other.tensors)
    same(one, other)


def test_strided_input_and_rows_without_a_finite_one() -> None:
    one, other = (Statistics.empty(24, torch.float32, DEVICE) for _ in range(2))
    x = torch.randn(24, 50, device=DEVICE).t()
    broken = torch.full((9, 24), math.nan, device=DEVICE)
    for batch in (broken, x, broken, x[::2]):
        kernel(batch, None, one)
        st.observe_ref(batch, None, *other.tensors)
    same(one, other)
    assert one.summary()["non_finite"] == 2 * 9 * 24


def test_variance_where_the_mean_dwarfs_the_spread() -> None:
    held = Statistics.empty(8, torch.float32, DEVICE)
    x = 1e6 + torch.randn(200, 8, device=DEVICE)
    kernel(x, None, held)
    torch.testing.assert_close(held.variance(), x.double().var(0), rtol=1e-6, atol=0)


def test_rows_go_where_those_of_another_state_lie() -> None:
    """A gradient's, after one that never came: drawn by the counters of the input."""
    x = Statistics.empty(3, torch.float32, DEVICE)
    one, other = (Statistics.empty(5, torch.float32, DEVICE) for _ in range(2))
    for number, m in enumerate((40, 12, 300, 1, *(50,) * 12)):
        ids = torch.arange(m, device=DEVICE, dtype=torch.float32) + 1000 * (number + 1)
        kernel(ids.unsqueeze(1).expand(m, 3), None, x)
        if number == 1:
            continue
        batch = ids.unsqueeze(1).expand(m, 5)
        observe(
            batch, None, *one.tensors, ahead=x.scalars, candidates=st.ROWS_PER_BATCH, weight=st.EW
        )
        st.observe_ref(batch, None, *other.tensors, ahead=x.scalars)
    same(one, other)
    assert one.batches == x.batches - 1 and one.scalars[3] == x.scalars[3]
    held = one.drawn()[:, 0]
    assert (held == 0).sum() < 12
    assert torch.equal(held[held != 0], x.drawn()[:, 0][held != 0])
