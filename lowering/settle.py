"""Choose first, look after: only kernels that would be chosen are tried, timed and quantified.

    solve    the best assignment, as if every kernel that nobody has looked at were right, accurate
             and as fast as it may be
    look     the chosen ones are tried (`first_use.py`), timed, and quantified at last
    again    until all that is chosen has been looked at

Exact, as far as the solver is (`balance.py` is near the optimum where the host counts): what was
not looked at can only be worse than it was taken for, so an assignment that is the best among all
and holds is the best among those that hold. Each round looks at something new, so it
ends. Where nothing has a price (emulation, tune="never" without rows, min_speedup=0) errors are
what is chosen by, and all are looked at beforehand; so are forwards under a loss budget, where a
score beside the price decides.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch

from loka_compile.lowering import first_use
from loka_compile.lowering.choose import Offers
from loka_compile.lowering.choose_sites import Answers
from loka_compile.lowering.choose_sites import Found
from loka_compile.lowering.contest import Contest
from loka_compile.lowering.price_book import Asked
from loka_compile.lowering.price_book import PriceBook
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.site_prices import SitePrices

#: A contest, a direction of it, a kernel.
Look = tuple[Contest, str, str]
Solve = Callable[[Mapping[str, Mapping[str, Offers]], Answers], Found]


@dataclass
class Spent:
    """Seconds and counts by phase, for the report."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: Counter[str] = field(default_factory=Counter)

    @contextlib.contextmanager
    def on(self, phase: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - begun


@dataclass
class Settling:
    """contests: site -> Contest, all that are decided together. broken: site -> why it cannot be
    quantified; it is left out then."""

    contests: dict[str, Contest]
    book: PriceBook
    emulate: bool
    spent: Spent = field(default_factory=Spent)
    broken: dict[str, str] = field(default_factory=dict)
    #: Chosen kernels that count as expected, since the time for timing was up.
    untimed: list[Look] = field(default_factory=list)
    _answers: Answers = field(default_factory=dict)
    _held: dict[str, tuple[Any, dict[str, Offers]]] = field(default_factory=dict)

    # -- beforehand -------------------------------------------------------------------------------

    def prepare(self, scored: bool) -> None:
        """Look at all where there is no price to go by, and at scored forwards."""
        if not self.emulate:
            for device in {one.device for one in self.contests.values()}:
                first_use.foresee(self._possible(device), device)
        with self.spent.on("timing"):
            self._learn()
        everything = [
            (one, d, k)
            for one in self.contests.values()
            for d in one.directions
            if (scored and d == "fwd") or not self._has_prices(one, d)
            for k in one.names(d)
        ]
        self._try(everything)
        self._measure(everything)

    def _possible(self, device: torch.device) -> Iterator[first_use.Asked]:
        for one in self.contests.values():
            if one.device == device and one.dtype is not None and first_use.is_odd(one.shape):
                for direction in one.directions:
                    yield from ((k, direction, one.shape, one.dtype) for k in one.names(direction))

    def _has_prices(self, one: Contest, direction: str) -> bool:
        if one.prices is None or one.options.min_speedup <= 0:
            return False
        if self.book.may_time(one.device):
            return True
        return any(one.prices.alone(direction, k) is not None for k in one.names(direction))

    def _learn(self) -> None:
        """Time kernels of which nothing is known, until something is: high precision first, then
        torch's, with which the others are compared."""
        for is_next in (
            lambda k: k == HIGH_PRECISION,
            lambda k: k.startswith("torch:"),
            lambda k: k != HIGH_PRECISION and not k.startswith("torch:"),
        ):
            while wanted := self._unknown(is_next):
                looks = [look for looks in wanted.values() for look in looks]
                self._try(looks)
                able = {a for a, own in wanted.items() if any(map(_may, own))}
                if not self._time(a for a in wanted if a in able) and len(able) == len(wanted):
                    break

    def _unknown(self, is_next: Callable[[str], bool]) -> dict[Asked, list[Look]]:
        """As many of each family as are needed to expect something of the rest."""
        found: dict[Asked, list[Look]] = {}
        needed: dict[object, int] = {}
        # The largest first: there is most to win.
        distinct = {id(c.prices): c for c in self.contests.values()}.values()
        for one in sorted(distinct, key=lambda c: c.shape.flops(), reverse=True):
            if not isinstance(one.prices, SitePrices) or not self.book.may_time(one.device):
                continue
            for direction in one.directions:
                names = one.names(direction)
                for kernel in [HIGH_PRECISION, *names] if names else []:
                    if not is_next(kernel):
                        continue
                    asked = one.prices.to_time(direction, kernel)
                    if self.book.part(asked) is not None or not self.book.wants_time(asked):
                        continue
                    family = asked.key.family()
                    if asked not in found:
                        left = needed.get(family)
                        if left is None:
                            left = max(self.book.expected.wants(asked.key), 1)
                        if left == 0:
                            continue
                        needed[family] = left - 1
                    found.setdefault(asked, []).append((one, direction, kernel))
        return found

    # -- rounds -----------------------------------------------------------------------------------

    def settle(
        self, solve: Solve, budget: float | None = None
    ) -> tuple[Found, dict[str, dict[str, Offers]]]:
        """The best assignment all of which was looked at, and the offers that it is out of."""
        while True:
            with self.spent.on("choice"):
                offers = self._offers(budget)
                found = solve(offers, self._answers)
            self.spent.counts["rounds"] += 1
            chosen = [
                (self.contests[site], direction, found.outcomes[site, direction].kernel)
                for site, direction in found.joint
            ]
            if self._look(chosen):
                continue
            if not self.book.open:
                self.untimed = [look for look in chosen if self._lacks(look)]
                # With the errors that were measured just now.
                return found, self._offers(budget)
            # What the chosen ones are compared with in reports.
            high = [(one, d, HIGH_PRECISION) for one, d, k in chosen if k != HIGH_PRECISION]
            if not self._time(self._asked(high)):
                self.book.close()

    def _lacks(self, look: Look) -> bool:
        one, direction, kernel = look
        prices = one.prices
        return isinstance(prices, SitePrices) and self.book.lacks(prices.to_time(direction, kernel))

    def unknown(self) -> set[Asked]:
        """Kernels that could not be chosen: nothing is known of them, since the time was up."""
        return {
            asked
            for one in self.contests.values()
            if isinstance(one.prices, SitePrices)
            for direction in one.directions
            for kernel in one.names(direction)
            for asked in (one.prices.to_time(direction, kernel),)
            if self.book.lacks(asked) and self.book.part(asked) is None
        }

    def _offers(self, budget: float | None) -> dict[str, dict[str, Offers]]:
        found = {}
        for name, one in self.contests.items():
            if name in self.broken:
                continue
            # Nothing has changed about most of them since the last round.
            prices = one.prices
            moves = prices.state if isinstance(prices, SitePrices) else self.book.version
            state = moves, len(one.tried), len(one.errors), budget
            try:
                if name not in self._held or self._held[name][0] != state:
                    self._held[name] = state, one.offers(budget)
                found[name] = self._held[name][1]
            except Exception as error:
                self.broken[name] = f"{type(error).__name__}: {error}"
        return found

    def _look(self, chosen: Iterable[Look]) -> bool:
        """Whether anything is otherwise than it was taken for."""
        chosen = list(chosen)
        low = [look for look in chosen if look[2] != HIGH_PRECISION]
        changed = self._try(low)
        able = [look for look in chosen if look[2] == HIGH_PRECISION or _may(look)]
        changed = bool(self._time(self._asked(able))) or changed
        return changed or self._measure(low)

    def _try(self, looks: Iterable[Look]) -> bool:
        """First uses of all that had none, at once; whether one failed."""
        if self.emulate:
            # Real kernels only: emulated ones are what others are compared with.
            return False
        fresh = [(c, d, k) for c, d, k in looks if k != HIGH_PRECISION and (d, k) not in c.tried]
        by_device: dict[torch.device, dict[first_use.Asked, None]] = {}
        for one, direction, kernel in fresh:
            assert one.dtype is not None
            asked = kernel, direction, one.shape, one.dtype
            by_device.setdefault(one.device, {})[asked] = None
        with self.spent.on("first uses"):
            why = {
                (device, asked): outcome
                for device, wanted in by_device.items()
                for asked, outcome in zip(wanted, first_use.check(wanted, device), strict=True)
            }
        self.spent.counts["first uses"] += len(why)
        for one, direction, kernel in fresh:
            assert one.dtype is not None
            outcome = why[one.device, (kernel, direction, one.shape, one.dtype)]
            one.tried[direction, kernel] = outcome
        return any(outcome is not None for outcome in why.values())

    def _asked(self, looks: Iterable[Look]) -> list[Asked]:
        """The dearest first: there what is expected may be off by the most."""
        found = {}
        for one, direction, kernel in looks:
            if isinstance(one.prices, SitePrices):
                asked = one.prices.to_time(direction, kernel)
                if self.book.wants_time(asked):
                    cost = self.book.part(asked)
                    found[asked] = 0.0 if cost is None or cost.us is None else cost.us
        return sorted(found, key=found.__getitem__, reverse=True)

    def _time(self, asked: Iterable[Asked]) -> int:
        with self.spent.on("timing"):
            count = self.book.time(asked)
        self.spent.counts["timing"] += count
        return count

    def _measure(self, looks: Iterable[Look]) -> bool:
        """Quantify; whether one is refused, or cannot be quantified."""
        changed = False
        with self.spent.on("errors"):
            for one, direction, kernel in looks:
                if one.name in self.broken or not _may((one, direction, kernel)):
                    continue
                self.spent.counts["errors"] += (direction, kernel) not in one.errors
                try:
                    changed = one.measure(direction, kernel) is not None or changed
                except Exception as error:
                    self.broken[one.name] = f"{type(error).__name__}: {error}"
                    changed = True
        return changed


def _may(look: Look) -> bool:
    one, direction, kernel = look
    return kernel == HIGH_PRECISION or one.tried.get((direction, kernel)) is None
