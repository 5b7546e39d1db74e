"""The ends of an error estimate against their definitions; interpreted without a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from loka_compile.kernels import estimate as kernels
from loka_compile.probe.estimate import FLOOR
from loka_compile.probe.statistics import BATCHES
from loka_compile.probe.statistics import CANDIDATES
from loka_compile.probe.statistics import HEAD
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.statistics import update

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_the_scalars_lie_where_the_probe_puts_them() -> None:
    assert (kernels._HEAD, kernels._BATCHES, kernels._CANDIDATES) == (HEAD, BATCHES, CANDIDATES)


@pytest.mark.parametrize(
    ("features", "dtype"),
    [(1, torch.float32), (40, torch.bfloat16), (1030, torch.float16), (1024, torch.bfloat16)],
)
def test_clean_rows_are_the_real_and_finite_ones(features, dtype) -> None:
    held = Statistics.empty(features, dtype, DEVICE)
    for scale in (1.0, 30.0, 0.1):
        x = scale * torch.randn(50, features, device=DEVICE)
        x[7, features // 2] = math.inf
        x[9] = math.nan
        update(x.to(dtype), held)
        got, good = kernels.clean(held.rows, held.scalars)
        want, real = kernels.clean_ref(held.rows, held.scalars)
        assert torch.equal(got, want) and torch.equal(good, real)
    assert 0 < int(good.sum()) < 96 and float(got[-1, 0]) == float(held.batch_maxima()[-1])
    nothing = Statistics.empty(features, dtype, DEVICE)
    got, good = kernels.clean(nothing.rows, nothing.scalars)
    assert not got.any() and not good.any()


@pytest.mark.parametrize(
    ("rows", "n", "dtype"),
    [(256, 1, torch.bfloat16), (256, 48, torch.float32), (256, 256, torch.bfloat16),
     (29, 100, torch.float32)],
)  # fmt: skip
def test_errors_are_those_of_the_definition(rows, n, dtype) -> None:
    good = (torch.rand(rows, device=DEVICE) < 0.8).int()
    ref = torch.randn(rows + 1, n, device=DEVICE) * torch.logspace(-20, 10, n, device=DEVICE)
    ref[:-1] *= good.unsqueeze(1)
    ref[:, n // 2] *= n == 1
    out = (ref * (1 + 0.1 * torch.randn_like(ref))).to(dtype)
    # Of the maximum's row.
    out[-1] = 7.0
    got = kernels.error(out, ref, good, FLOOR)
    want = kernels.error_ref(out, ref, good, FLOOR)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    out[3, 0], good[3] = math.nan, 1
    ref[3, 0] = 1.0
    assert math.isnan(float(kernels.error(out, ref, good, FLOOR)))


def test_nothing_and_weights_that_are_broken_have_no_error() -> None:
    ref, good = torch.zeros(257, 32, device=DEVICE), torch.ones(256, device=DEVICE).int()
    assert float(kernels.error(ref + 1, ref, good, FLOOR)) == 0
    ref[:, 3] = math.nan
    for one in (kernels.error, kernels.error_ref):
        assert float(one(ref, ref, good, FLOOR)) == 0
    with pytest.raises(ValueError, match="contiguous"):
        kernels.error(ref, torch.zeros(32, 257, device=DEVICE).t(), good, FLOOR)
    with pytest.raises(ValueError, match="channels"):
        kernels.error(torch.zeros(3, 300), torch.zeros(3, 300), good, FLOOR)
