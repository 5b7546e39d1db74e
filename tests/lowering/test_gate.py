"""Which errors each gate lets through."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from loka_compile.lowering import gate
from loka_compile.probe.quantify import Errors

GOOD = Errors(
    mere=0.1,
    mere_clamped=0.05,
    mere_clamped_upper=0.06,
    bad_rows=0.0,
    bad_rows_upper=0.0,
    sqnr_db=28.0,
    centred=0.04,
    non_finite=0,
    samples=8,
)


@pytest.mark.parametrize("which", ["robust", "paper"])
def test_good_errors_pass(which):
    assert gate.why_refused(GOOD, which, 0.2) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mere_clamped_upper": 0.2}, "clamped MERE 0.2 >= 0.2"),
        ({"mere_clamped_upper": math.nan}, "clamped MERE nan"),
        ({"mere_clamped_upper": math.inf}, "clamped MERE inf"),
        ({"bad_rows_upper": gate.MAX_BAD_ROWS}, "1 % of rows"),
        ({"bad_rows_upper": math.nan}, "% of rows"),
        ({"non_finite": 3}, "3 non-finite"),
        ({"samples": 0}, "no finite row"),
    ],
)
def test_robust_refuses_with_the_number(change, says):
    assert says in gate.why_refused(replace(GOOD, **change), "robust", 0.2)


def test_robust_reads_upper_bounds_and_not_the_plain_mere():
    assert gate.why_refused(replace(GOOD, mere=math.inf), "robust", 0.2) is None
    assert gate.why_refused(replace(GOOD, mere_clamped=0.01), "robust", 0.06) is not None
    assert gate.why_refused(GOOD, "robust", 0.061) is None


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        ({"mere": 0.199}, True),
        ({"mere": 0.2}, False),
        ({"mere": math.inf}, False),
        ({"mere": math.nan}, False),
        ({"non_finite": 1}, False),
        # It is taken literally: the row share is no part of it.
        ({"bad_rows_upper": 1.0, "mere_clamped_upper": 1.0}, True),
    ],
)
def test_paper_reads_the_plain_mere(change, passes):
    assert (gate.why_refused(replace(GOOD, **change), "paper", 0.2) is None) is passes
