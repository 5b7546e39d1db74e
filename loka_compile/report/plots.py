"""Geometry of the report's plots: points, bars and ticks in the units of an SVG view box."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loka_compile.report import gains
from loka_compile.report import tables

MOST_ROWS = 40
WIDTH = 760
_ROW = 20
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 12, 44


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    direction: str
    #: Does the kernel run; a refused one is drawn hollow.
    runs: bool
    site: int
    title: str


@dataclass(frozen=True)
class Plot:
    title: str
    height: float
    left: float
    x_label: str
    y_label: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    points: list[Point]
    note: str = ""

    width = WIDTH

    @property
    def right(self) -> float:
        return WIDTH - _RIGHT

    @property
    def bottom(self) -> float:
        return self.height - _BOTTOM

    top = _TOP


@dataclass(frozen=True)
class Bar:
    direction: str
    high: float
    chosen: float
    high_us: float
    chosen_us: float
    sites: int


@dataclass(frozen=True)
class _Measured:
    site: int
    name: str
    direction: str
    kernel: str
    runs: bool
    error: float
    speedup: float | None


def error_plot(sites: Sequence[Mapping[str, Any]]) -> Plot | None:
    """Error against speedup; where nothing was timed, error per site. None: nothing measured."""
    every = [
        _Measured(
            index,
            site["name"],
            direction,
            # Of a site that stays high, the numbers are those of the kernel that was refused.
            tables.short(choice["kernel"]) if tables.is_low(choice) else "refused kernel",
            tables.is_low(choice),
            choice["mere_clamped"],
            choice.get("speedup"),
        )
        for index, site in enumerate(sites)
        for direction, choice in tables.choices(site).items()
        if choice.get("mere_clamped") is not None
    ]
    drawn = [m for m in every if math.isfinite(m.error)]
    if not drawn:
        return None
    lost = len(every) - len(drawn)
    note = f"{lost} errors are not finite and are not drawn" if lost else ""
    timed = [m for m in drawn if m.speedup is not None and math.isfinite(m.speedup)]
    return _against_speedup(timed, note) if timed else _per_site(drawn, note)


def _against_speedup(found: list[_Measured], note: str) -> Plot:
    height = 340
    ys = _Log([m.error for m in found], height - _BOTTOM, _TOP)
    xs = _Linear([m.speedup or 0.0 for m in found] + [1.0], _LEFT, WIDTH - _RIGHT)
    points = [_point(m, xs(m.speedup or 0.0), ys(m.error)) for m in found]
    return Plot(
        "Error against speedup",
        height,
        _LEFT,
        "speedup over high precision",
        "clamped MERE (log)",
        xs.ticks(),
        ys.ticks(),
        points,
        note,
    )


def _per_site(found: list[_Measured], note: str) -> Plot:
    worst: dict[int, float] = {}
    for m in found:
        worst[m.site] = max(m.error, worst.get(m.site, 0.0))
    kept = sorted(sorted(worst, key=lambda s: -worst[s])[:MOST_ROWS])
    if len(kept) < len(worst):
        more = f"the {len(kept)} of {len(worst)} sites with the largest error"
        note = f"{more}; {note}" if note else more
    rows = {site: _TOP + _ROW * (i + 0.5) for i, site in enumerate(kept)}
    names = {m.site: m.name for m in found}
    left = min(max(len(names[s]) for s in kept), 34) * 6.6 + 16
    xs = _Log([m.error for m in found if m.site in rows], left, WIDTH - _RIGHT)
    return Plot(
        "Error per site (no speedup was measured)",
        _TOP + _ROW * len(kept) + _BOTTOM,
        left,
        "clamped MERE (log)",
        "",
        xs.ticks(),
        [Tick(y, _clip(names[s], 34)) for s, y in rows.items()],
        [_point(m, xs(m.error), rows[m.site]) for m in found if m.site in rows],
        note,
    )


def _clip(text: str, most: int) -> str:
    return text if len(text) <= most else "…" + text[1 - most :]


def _point(m: _Measured, x: float, y: float) -> Point:
    speedup = "" if m.speedup is None else f", speedup {m.speedup:.2f}"
    title = f"{m.name} {m.direction}: {m.kernel}, clamped MERE {m.error:.3g}{speedup}"
    return Point(round(x, 1), round(y, 1), m.direction, m.runs, m.site, title)


class _Log:
    """Values -> positions on a log axis; zero and below stand at its low end."""

    def __init__(self, values: Sequence[float], low: float, high: float) -> None:
        positive = [v for v in values if v > 0] or [1.0]
        self.first = math.log10(min(positive) / 1.25)
        self.last = math.log10(max(positive) * 1.25)
        self.low, self.high = low, high

    def __call__(self, value: float) -> float:
        share = 0.0
        if value > 0:
            share = (math.log10(value) - self.first) / (self.last - self.first)
        return self.low + share * (self.high - self.low)

    def ticks(self) -> list[Tick]:
        decades = range(math.floor(self.first), math.ceil(self.last) + 1)
        span = self.last - self.first
        steps: Sequence[float] = (1,) if span > 3 else (1, 2, 5)
        if span < 0.6:
            steps = (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
        values = [m * 10.0**d for d in decades for m in steps]
        inside = [v for v in values if self.first <= math.log10(v) <= self.last]
        return [Tick(round(self(v), 1), f"{v:.3g}") for v in inside]


class _Linear:
    def __init__(self, values: Sequence[float], low: float, high: float) -> None:
        first, last = min(values), max(values)
        rough = max(last - first, 0.1) / 6
        size = 10.0 ** math.floor(math.log10(rough))
        self.step = next(m * size for m in (1, 2, 5, 10) if m * size >= rough)
        self.first = math.floor(first / self.step) * self.step
        self.last = math.ceil(max(last, first + self.step) / self.step) * self.step
        self.low, self.high = low, high

    def __call__(self, value: float) -> float:
        return self.low + (value - self.first) / (self.last - self.first) * (self.high - self.low)

    def ticks(self) -> list[Tick]:
        steps = round((self.last - self.first) / self.step)
        values = [self.first + i * self.step for i in range(steps + 1)]
        return [Tick(round(self(v), 1), f"{v:.4g}") for v in values]


def time_bars(sites: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Per direction, the summed time of all timed sites: in high precision, and as chosen."""
    found = gains.times(sites)
    longest = max([1e-9, *(max(t.high, t.chosen) for t in found)])
    return [
        Bar(
            t.direction, 100 * t.high / longest, 100 * t.chosen / longest, t.high, t.chosen, t.sites
        )
        for t in found
    ]
