"""Prices of parts while one plan is made: looked up once, timed only where that decides.

Until a kernel was timed it counts for the least that it may cost, by what is expected of it: so it
is chosen, and then timed, wherever it could be the fastest. Timing has its time
(`timing_budget.py`); what is left then counts as expected. Parts that move memory are never timed
here (`loka bench` does): how Inductor does them would have to be compiled, in seconds each.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from loka_compile.errors import CostTableError
from loka_compile.lowering.cost_store import CostTable
from loka_compile.lowering.cost_table import CostKey
from loka_compile.lowering.expected import Expected
from loka_compile.lowering.measure import Cost
from loka_compile.lowering.measure import keep
from loka_compile.lowering.measure import timed
from loka_compile.lowering.parts import MEMORY_BOUND
from loka_compile.lowering.parts import QUANTISE
from loka_compile.lowering.timing_budget import TimingBudget

log = logging.getLogger("loka_compile")


@dataclass(frozen=True)
class Asked:
    """A part, and how it is timed."""

    key: CostKey
    dtype: torch.dtype
    device: torch.device


class PriceBook:
    """`version` moves when a price may have changed; `moved_since` says which."""

    def __init__(self, table: CostTable, tune: str, budget: TimingBudget | None = None) -> None:
        """budget: that of the graph, which others may share; by default one for this plan alone."""
        self.table = table
        self.tune = tune
        self.budget = TimingBudget() if budget is None else budget
        self.budget.opened = True
        self.expected = Expected(table)
        #: While it is, kernels that were not timed count for the least that they may cost.
        self.open = tune == "auto"
        self.version = 0
        self.timed = 0
        self._rows: dict[CostKey, Cost] = {}
        try:
            self._rows.update((row.key, Cost(row.us, "table")) for row in table.rows())
        except CostTableError as error:
            log.warning("loka: %s; the plan is made without its rows", error)
        self._known: dict[CostKey, Cost | None] = {}
        self._expectations: dict[CostKey, Cost] = {}
        #: What moved with each version.
        self._moves: list[frozenset[CostKey]] = []

    def moved_since(self, version: int) -> frozenset[CostKey]:
        """Keys whose price is another than it was at `version`, beside those that had none."""
        return frozenset().union(*self._moves[version:])

    def may_time(self, device: torch.device) -> bool:
        return self.tune == "auto" and device.type == "cuda"

    def part(self, one: Asked) -> Cost | None:
        """None for a kernel of which nothing is known yet."""
        key = one.key
        held = self._rows.get(key)
        if held is not None:
            return held
        if key not in self._known:
            self._known[key] = self._estimate(one)
        return self._known[key]

    def _estimate(self, one: Asked) -> Cost | None:
        if one.key.direction in MEMORY_BOUND:
            return Cost(self.expected.moved(one.key, one.dtype.itemsize), "estimated")
        basis = self.expected.gemm(one.key)
        if basis is None:
            return None
        return Cost(basis.us(one.key) / (basis.slack if self.open else 1.0), "estimated")

    def expectation(self, one: Asked) -> Cost | None:
        """Of a kernel, whether it has a row or not. What has one keeps it (`Expected.forget`)."""
        held = self._expectations.get(one.key)
        if held is None:
            basis = self.expected.gemm(one.key)
            if basis is None:
                return None
            held = self._expectations[one.key] = Cost(basis.us(one.key), "estimated")
        return held

    def knows_moving(self, one: Asked) -> bool:
        """Rows say something of a part that moves memory, not its bytes alone."""
        key = one.key
        assert key.direction == QUANTISE, key
        return key in self._rows or self.expected.scale(key, one.dtype.itemsize) is not None

    def wants_time(self, one: Asked) -> bool:
        """It has not been timed, and would be."""
        if not self.open or not self.lacks(one):
            return False
        return self.budget.allows(expected=self.part(one) is not None)

    def lacks(self, one: Asked) -> bool:
        """It has no row, on a device where it could be timed."""
        return one.key not in self._rows and self.may_time(one.device)

    def time(self, wanted: Iterable[Asked]) -> int:
        """Time what has no row, for as long as there is time; how many were timed."""
        found: dict[CostKey, Cost] = {}
        begun, before = time.monotonic(), self.budget.seconds
        for one in dict.fromkeys(wanted):
            self.budget.seconds = before + time.monotonic() - begun
            if self.wants_time(one):
                found[one.key] = timed(one.key, one.dtype, one.device)
                self._rows[one.key] = found[one.key]
        if found:
            keep(found, self.table)
            self.expected.forget()
            self._changed([key for key, cost in self._known.items() if cost is None], found)
        self.timed += sum(cost.us is not None for cost in found.values())
        self.budget.seconds = before + time.monotonic() - begun
        return len(found)

    def close(self) -> None:
        """What was not timed counts as expected from now on."""
        self.open = False
        if self.timed and torch.cuda.is_available():
            # What captured graphs allocated is theirs until then.
            torch.cuda.empty_cache()
        self._changed(list(self._known))

    def _changed(self, known: Iterable[CostKey], timed: Iterable[CostKey] = ()) -> None:
        known = list(known)
        self.version += 1
        self._moves.append(frozenset(known).union(timed))
        for key in known:
            del self._known[key]
