"""GEMM sites -> what FP8 covers and what it gains: shares of work, and time where it is known."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.report import tables

Sites = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Share:
    """FP8 in one direction: how many linears of how many, and their share of its FLOPs."""

    direction: str
    fp8: int
    linears: int
    flops: float


@dataclass(frozen=True)
class Time:
    """Summed time of the timed GEMMs of one direction, in us: in high precision, and as chosen."""

    direction: str
    high: float
    chosen: float
    sites: int


def shares(sites: Sites) -> list[Share]:
    found = []
    for direction in DIRECTIONS:
        fp8 = linears = 0
        work = covered = 0.0
        for site in sites:
            choice = tables.choices(site).get(direction)
            if choice is None:
                continue
            count = site.get("count") or 1
            flops = 2.0 * count * site["M"] * site["K"] * site["N"]
            linears, work = linears + count, work + flops
            if tables.is_fp8(choice):
                fp8, covered = fp8 + count, covered + flops
        if linears:
            found.append(Share(direction, fp8, linears, covered / work if work else 0.0))
    return found


def times(sites: Sites) -> list[Time]:
    """Of a site that stays high, `us` is the refused kernel's, so its own time is us * speedup."""
    sums: dict[str, Time] = {}
    for site in sites:
        for direction, high, chosen in _timed(site):
            old = sums.get(direction, Time(direction, 0.0, 0.0, 0))
            count = site.get("count") or 1
            sums[direction] = Time(
                direction, old.high + high, old.chosen + chosen, old.sites + count
            )
    return [sums[d] for d in DIRECTIONS if d in sums]


def _timed(site: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    count = site.get("count") or 1
    for direction, c in tables.choices(site).items():
        us, speedup = c.get("us"), c.get("speedup")
        if us is not None and speedup is not None:
            high = count * us * speedup
            yield direction, high, count * us if tables.is_low(c) else high


def total(sites: Sites) -> tuple[float, float] | None:
    """(us in high precision, us as chosen) of all timed GEMMs; None where nothing was timed."""
    found = times(sites)
    return (sum(t.high for t in found), sum(t.chosen for t in found)) if found else None


def overall(site: Mapping[str, Any]) -> float | None:
    """The speedup of one site over all its timed directions."""
    found = list(_timed(site))
    chosen = sum(c for _, _, c in found)
    return sum(h for _, h, _ in found) / chosen if chosen and tables.has_low(site) else None


def span(us: float) -> str:
    """`812 us`, `16.6 ms`."""
    return f"{us:.3g} us" if us < 1000 else f"{us / 1000:.3g} ms"


def lines(sites: Sites) -> Iterator[str]:
    found = shares(sites)
    if any(s.fp8 for s in found):
        each = (
            f"{s.direction} {s.fp8} of {s.linears} ({100 * s.flops:.0f} % of FLOPs)" for s in found
        )
        yield f"FP8 runs in: {', '.join(each)}"
    both = total(sites)
    if both is not None:
        high, chosen = both
        yield (
            f"timed GEMMs: {span(high)} in high precision, {span(chosen)} as chosen"
            f" ({high / chosen:.2f}x)"
        )
