"""Drift: a two-sided CUSUM per site and quantity, on log2 values. It alarms; it switches nothing.

    reference  mean and deviation of the first `warmup` values
    S+ <- max(0, S+ + z - K)      S- <- max(0, S- - z - K)      z = (value - mean) / deviation
    alarm when either passes H; the reference is then taken anew, so that one shift is one event

With K = 0.75 and H = 8 a reference mean that is off by half a deviation does not alarm, and a shift
of three deviations is seen after four values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from dataclasses import field

K = 0.75
H = 8.0
WARMUP = 32
#: Smallest deviation, in log2 units (3.5 %): a nearly constant series (a maximum that an activation
#: bounds) must not alarm at changes that no kernel minds.
LEAST_DEVIATION = 0.05


@dataclass(frozen=True)
class DriftEvent:
    """`site` left its reference: `quantity` is now `factor` times what it was."""

    site: str
    quantity: str
    step: int
    factor: float

    def __str__(self) -> str:
        return (
            f"{self.site}: {self.quantity} drifted to {self.factor:.3g} times its reference "
            f"(step {self.step})"
        )


@dataclass
class Cusum:
    """One series. `feed` returns the shift in log2 units when it alarms, else None."""

    warmup: int = WARMUP
    values: list[float] = field(default_factory=list)
    mean: float = 0.0
    deviation: float = 0.0
    high: float = 0.0
    low: float = 0.0
    #: Values since either sum last stood at zero: where the change is thought to have begun.
    rising: list[float] = field(default_factory=list)
    falling: list[float] = field(default_factory=list)

    def feed(self, value: float) -> float | None:
        if not math.isfinite(value):
            return None
        if len(self.values) < self.warmup:
            self.values.append(value)
            if len(self.values) == self.warmup:
                self.mean = sum(self.values) / self.warmup
                spread = sum((v - self.mean) ** 2 for v in self.values) / (self.warmup - 1)
                self.deviation = max(math.sqrt(spread), LEAST_DEVIATION)
            return None
        z = (value - self.mean) / self.deviation
        self.high = max(0.0, self.high + z - K)
        self.low = max(0.0, self.low - z - K)
        self.rising = [*self.rising, value] if self.high else []
        self.falling = [*self.falling, value] if self.low else []
        if max(self.high, self.low) < H:
            return None
        since = self.rising if self.high >= self.low else self.falling
        shift = sum(since) / len(since) - self.mean
        self.values, self.rising, self.falling, self.high, self.low = [], [], [], 0.0, 0.0
        return shift


class DriftWatch:
    """All series of a run. `events` keeps the last 1,000 alarms."""

    def __init__(self, warmup: int = WARMUP) -> None:
        self.warmup = warmup
        self.events: list[DriftEvent] = []
        self._series: dict[tuple[int, str, str], Cusum] = {}

    def feed(
        self,
        site: str,
        quantity: str,
        step: int,
        value: float,
        owner: int = 0,
        warmup: int | None = None,
    ) -> DriftEvent | None:
        """value: the quantity itself, positive; zero and less are not looked at.

        owner: tells apart models of one process whose sites have the same names. warmup: values of
        this series that make its reference, where it is not the watch's own number.
        """
        if not value > 0:
            return None
        series = self._series.setdefault(
            (owner, site, quantity), Cusum(self.warmup if warmup is None else warmup)
        )
        shift = series.feed(math.log2(value))
        if shift is None:
            return None
        event = DriftEvent(site, quantity, step, 2.0**shift)
        self.events = [*self.events[-999:], event]
        return event

    def forget(self, owner: int) -> None:
        """Its series are over; its alarms stay."""
        self._series = {k: one for k, one in self._series.items() if k[0] != owner}
