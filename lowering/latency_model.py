"""Latency of a kernel in M as a piecewise-linear sympy expression, and break-even batches solved.

Knots are the M of measured rows (or of estimates); between two knots the latency is a line, below
the first it is constant, above the last it goes on with the last slope. Everything is rational, so
that a break-even is exact, and nothing here ever sees a symbolic size of a graph: a dynamic batch
is priced at its hint.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    import sympy

#: M at which latencies are asked for where no rows say.
GRID = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class Latency:
    """Microseconds at knots M, ascending."""

    knots: tuple[tuple[int, Fraction], ...]

    @classmethod
    def of(cls, points: Mapping[int, float]) -> Latency:
        """Raises ValueError without points."""
        if not points:
            raise ValueError("a latency needs at least one M")
        exact = {m: Fraction(us).limit_denominator(10**6) for m, us in points.items()}
        return cls(tuple(sorted(exact.items())))

    def segments(self) -> list[tuple[int, int | None, Fraction, Fraction]]:
        """(from M, to M or None, value at from, slope), ascending, without gaps, from M = 0."""
        first_m, first = self.knots[0]
        found: list[tuple[int, int | None, Fraction, Fraction]] = []
        if first_m > 0:
            found.append((0, first_m, first, Fraction(0)))
        for (m0, us0), (m1, us1) in zip(self.knots, self.knots[1:], strict=False):
            found.append((m0, m1, us0, (us1 - us0) / (m1 - m0)))
        last_m, last = self.knots[-1]
        slope = max(found[-1][3], Fraction(0)) if len(self.knots) > 1 else Fraction(0)
        found.append((last_m, None, last, slope))
        return found

    def at(self, m: int) -> float:
        return float(self.exact(m))

    def exact(self, m: int) -> Fraction:
        for start, stop, us, slope in self.segments():
            if stop is None or m < stop:
                return us + slope * (m - start)
        raise AssertionError("the last segment has no end")

    def expression(self, m: sympy.Symbol) -> sympy.Expr:
        """The Piecewise in the symbol `m`."""
        import sympy

        pieces: list[tuple[Any, Any]] = []
        for start, stop, us, slope in self.segments():
            line = sympy.Rational(us.numerator, us.denominator) + sympy.Rational(
                slope.numerator, slope.denominator
            ) * (m - start)
            pieces.append((line, True if stop is None else m < stop))
        return sympy.Piecewise(*pieces)


def latency_of(us_at: Callable[[int], float | None], ms: Iterable[int] = GRID) -> Latency | None:
    """Sample `us_at` (None where it does not know) at `ms`; None where it knows nothing."""
    points = {m: us for m in ms if (us := us_at(m)) is not None}
    return Latency.of(points) if points else None


def break_even(fast: Latency, slow: Latency, speedup: float = 1.0) -> int | None:
    """The least M from which on slow(M) >= speedup * fast(M) for every larger M; None if never.

    Solved on each segment of the difference, which is a line there; not searched. In fractions:
    sympy gives the same, in a tenth of a second per pair of kernels.
    """
    ratio = Fraction(speedup).limit_denominator(10**6)
    ends = sorted({0, *(k for k, _ in fast.knots), *(k for k, _ in slow.knots)})

    def gain(m: int) -> Fraction:
        return slow.exact(m) - ratio * fast.exact(m)

    # Behind the last knot both are lines: two points say how it ends.
    last = ends[-1]
    beyond = gain(last + 1) - gain(last)
    if beyond < 0 or (gain(last) < 0 and beyond == 0):
        return None
    if gain(last) < 0:
        return math.ceil(last - gain(last) / beyond)
    for start, stop in zip(ends[-2::-1], ends[:0:-1], strict=True):
        if gain(start) < 0:
            # It pays at `stop` and not at `start`: one root of a line in between.
            slope = (gain(stop) - gain(start)) / (stop - start)
            return math.ceil(start - gain(start) / slope)
    return 1
