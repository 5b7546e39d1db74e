"""Shares of work in FP8, and time in high precision against time as chosen."""

from __future__ import annotations

import pytest

from loka_compile.report import gains

HIGH = {"kernel": "high_precision", "us": None, "speedup": None}
FP8 = {**HIGH, "kernel": "torch:rowwise", "us": 10.0, "speedup": 1.5}
REFUSED = {**HIGH, "us": 20.0, "speedup": 0.8}


def site(fwd, wgrad=HIGH, count=1, m=4, k=2, n=8):
    return {"M": m, "K": k, "N": n, "count": count, "directions": {"fwd": fwd, "wgrad": wgrad}}


SITES = [site(FP8, REFUSED, count=2), site(REFUSED, FP8, m=8), site(HIGH)]


def test_shares_count_linears_and_work():
    fwd, wgrad = gains.shares(SITES)
    assert (fwd.direction, fwd.fp8, fwd.linears, fwd.flops) == ("fwd", 2, 4, pytest.approx(2 / 5))
    assert (wgrad.fp8, wgrad.linears, wgrad.flops) == (1, 4, pytest.approx(2 / 5))
    assert gains.shares([]) == []
    assert gains.shares([site(FP8, m=0)])[0].flops == 0


def test_a_refused_kernels_time_stands_for_that_of_high_precision():
    fwd, wgrad = gains.times(SITES)
    # 2 x 10 us at 1.5x, and 20 us of a kernel that was refused at 0.8x: 16 us in high precision.
    assert (fwd.high, fwd.chosen, fwd.sites) == pytest.approx((46, 36, 3))
    assert (wgrad.high, wgrad.chosen) == pytest.approx((47, 42))
    assert gains.total(SITES) == pytest.approx((93, 78))
    assert gains.total([site(HIGH)]) is None


def test_one_sites_speedup_is_that_of_its_directions_together():
    assert gains.overall(SITES[0]) == pytest.approx((2 * 15 + 2 * 16) / (2 * 10 + 2 * 16))
    assert gains.overall(site(REFUSED)) is None and gains.overall(site(HIGH)) is None


def test_lines():
    fp8, time = gains.lines(SITES)
    assert fp8 == ("FP8 runs in: fwd 2 of 4 (40 % of FLOPs), wgrad 1 of 4 (40 % of FLOPs)")
    assert time == "timed GEMMs: 93 us in high precision, 78 us as chosen (1.19x)"
    assert list(gains.lines([site(HIGH)])) == []
    assert gains.span(16_640) == "16.6 ms"
