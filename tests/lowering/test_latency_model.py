"""Piecewise-linear latencies and solved break-even batches."""

from __future__ import annotations

import random

import pytest
import sympy

from loka_compile.lowering.latency_model import GRID
from loka_compile.lowering.latency_model import Latency
from loka_compile.lowering.latency_model import break_even
from loka_compile.lowering.latency_model import latency_of


def test_lines_between_knots_constant_below_and_on_above():
    one = Latency.of({128: 4.0, 256: 6.0, 1024: 9.0})
    assert [one.at(m) for m in (0, 1, 128, 192, 256, 640, 1024)] == [4, 4, 4, 5, 6, 7.5, 9]
    assert one.at(1792) == 12.0
    # Latencies do not fall with M for ever.
    assert Latency.of({1: 5.0, 2: 3.0}).at(100) == 3.0
    assert Latency.of({64: 2.5}).at(10**6) == 2.5
    with pytest.raises(ValueError):
        Latency.of({})


def test_the_expression_is_the_same_function():
    one = Latency.of({16: 3.0, 100: 4.25, 900: 31.5})
    m = sympy.Symbol("m")
    expression = one.expression(m)
    assert isinstance(expression, sympy.Piecewise)
    for at in (0, 15, 16, 57, 100, 899, 900, 5000):
        assert float(expression.subs(m, at)) == pytest.approx(one.at(at))


def test_break_even_of_two_lines_is_exact():
    """3 + m/100 against 5 + m/200: equal at m = 400, from where the second is faster."""
    slow = Latency.of({0: 3.0, 1000: 13.0})
    fast = Latency.of({0: 5.0, 1000: 10.0})
    assert break_even(fast, slow) == 400
    assert break_even(slow, fast) is None
    # 5 % faster: 3 + m/100 = 1.05 (5 + m/200), m = 2.25 / 0.00475 = 473.7.
    assert break_even(fast, slow, 1.05) == 474


def test_break_even_at_the_ends():
    slow, fast = Latency.of({16: 5.0, 1000: 20.0}), Latency.of({16: 4.0, 1000: 10.0})
    assert break_even(fast, slow) == 1
    assert break_even(slow, slow) == 1
    # Only behind the last knot.
    assert break_even(Latency.of({0: 5.0, 100: 5.5}), Latency.of({0: 3.0, 100: 5.0})) == 134
    # Pays, then not, then again: only the last stretch counts.
    wavy = Latency.of({0: 1.0, 100: 9.0, 200: 9.0, 300: 9.0})
    other = Latency.of({0: 5.0, 100: 5.0, 200: 8.0, 300: 12.0})
    assert break_even(wavy, other) == 225


@pytest.mark.parametrize("seed", range(8))
def test_break_even_equals_a_search(seed):
    random_ = random.Random(seed)
    a, b = (
        Latency.of({m: random_.uniform(1, 5) + m * random_.uniform(0.001, 0.02) for m in GRID[:6]})
        for _ in range(2)
    )
    speedup = random_.choice([1.0, 1.05])
    got = break_even(a, b, speedup)
    pays = [b.at(m) >= speedup * a.at(m) for m in range(1, 3000)]
    if not pays[-1]:
        assert got is None or got >= 3000
    else:
        want = max((m for m, ok in enumerate(pays, 1) if not ok), default=0) + 1
        assert got == want


def test_unknown_sizes_are_left_out():
    one = latency_of(lambda m: None if m < 100 else float(m))
    assert one is not None and one.knots[0][0] == 128
    assert latency_of(lambda m: None) is None
