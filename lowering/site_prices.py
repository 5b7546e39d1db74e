"""Prices at one site: of each direction in each form that it may take, and of what they share."""

from __future__ import annotations

import operator
from collections.abc import Callable
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from typing import TypeVar
from typing import cast

from loka_compile.lowering import chain
from loka_compile.lowering.cost_store import CostTable
from loka_compile.lowering.cost_store import default_table
from loka_compile.lowering.cost_table import CostKey
from loka_compile.lowering.host_costs import HostCosts
from loka_compile.lowering.libraries import LIBRARIES
from loka_compile.lowering.libraries import kernel_names
from loka_compile.lowering.measure import Cost
from loka_compile.lowering.measure import part_price
from loka_compile.lowering.measure import price
from loka_compile.lowering.parts import HANDED
from loka_compile.lowering.parts import PLAIN
from loka_compile.lowering.parts import Pair
from loka_compile.lowering.parts import Place
from loka_compile.lowering.parts import backward_parts
from loka_compile.lowering.parts import forward_parts
from loka_compile.lowering.price_book import Asked
from loka_compile.lowering.price_book import PriceBook
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION

T = TypeVar("T")

#: From the best founded to the worst; a sum is as good as its worst part.
_SOURCES = ("table", "measured", "estimated", "failed")


def add(costs: Iterable[Cost | None]) -> Cost | None:
    """The sum; None where one of them is not known, "failed" where one failed."""
    total, host, worst = 0.0, 0.0, 0
    for cost in costs:
        if cost is None or cost.us is None:
            return cost
        total += cost.us
        host += cost.host
        worst = max(worst, _SOURCES.index(cost.source))
    return Cost(max(total, 0.0), _SOURCES[worst], host=host)


class SitePrices:
    """producer: the prices of the site that could hand its output over to this one.

    Without prices for kernels alone, those of whole directions stand, which hold shared parts
    whole; `apart` is then False. host: what parts cost the host, where it has to start them. book:
    of the plan that is being made; without one, what has no row is timed on the spot.
    """

    def __init__(
        self,
        place: Place,
        *,
        tune: str,
        producer: SitePrices | None = None,
        table: CostTable | None = None,
        host: HostCosts | None = None,
        book: PriceBook | None = None,
    ) -> None:
        self.place = place
        self.host = host
        self.tune = tune
        self.producer = producer
        self.book = book
        self.table = default_table() if table is None else table
        self._known: dict[CostKey, Cost | None] = {}
        #: Sums, asked for again whenever a choice is looked at: (what, of what) -> its price.
        self._sums: dict[tuple[Any, ...], Any] = {}
        #: The same, of what no timing moves: the parts of a direction, and what is saved.
        self._fixed: dict[tuple[Any, ...], Any] = {}
        self._version = 0 if book is None else book.version
        #: Moves when a part's price does, and what it was of the producer's.
        self._moves, self._producers = 0, 0
        #: Something has no price yet, and may have one whenever anything was timed.
        self._open = False
        self.apart = self._has_parts()

    def _has_parts(self) -> bool:
        """Where nothing may be timed, a table may know kernels alone in high precision only: rows
        of whole directions then say more."""
        if self.book is not None and self.book.may_time(self.place.device):
            return True
        if any(self._gemm(d, HIGH_PRECISION) is None for d in DIRECTIONS):
            return False
        if self.tune == "auto" and self.place.device.type == "cuda":
            return True
        if any(self._gemm("fwd", kernel) is not None for kernel in kernel_names()):
            return True
        return self._whole("fwd", HIGH_PRECISION, False) is None

    def _part(self, key: CostKey) -> Cost | None:
        self._refresh()
        if key not in self._known:
            dtype, device = self.place.dtype, self.place.device
            if self.book is not None:
                cost = self.book.part(Asked(key, dtype, device))
            else:
                cost = part_price(key, dtype, device, tune=self.tune, table=self.table)
            if self.host is not None and cost is not None and cost.us is not None:
                cost = replace(cost, host=self.host.us(key))
            self._known[key] = cost
            self._open |= cost is None
        return self._known[key]

    @property
    def state(self) -> tuple[int, int]:
        """While it is the same, so is every price."""
        self._refresh()
        return self._moves, self._producers

    def _refresh(self) -> None:
        book = self.book
        if book is None or self._version == book.version:
            return
        moved = book.moved_since(self._version)
        self._version = book.version
        gone = [*self._known] if self._open else [*self._known.keys() & moved]
        if gone or self._open:
            for key in gone:
                del self._known[key]
            self._sums.clear()
            self._moves += 1
            self._open = False
        if self.producer is not None:
            # Sums here hold what the producer pays to hand over.
            self.producer._refresh()
            if self._producers != self.producer._moves:
                self._producers = self.producer._moves
                self._sums.clear()

    def _kept(self, what: tuple[Any, ...], made: Callable[[], T]) -> T:
        self._refresh()
        if what not in self._sums:
            found = made()
            self._sums[what] = found
        return cast("T", self._sums[what])

    def _fixed_for(self, what: tuple[Any, ...], made: Callable[[], T]) -> T:
        if what not in self._fixed:
            self._fixed[what] = made()
        return cast("T", self._fixed[what])

    def to_time(self, direction: str, kernel: str) -> Asked:
        """What there is to time of a kernel here: itself, since other parts go by their bytes."""
        return Asked(self.place.gemm(direction, kernel), self.place.dtype, self.place.device)

    def _gemm(self, direction: str, kernel: str) -> Cost | None:
        return self._part(self.place.gemm(direction, kernel))

    def _whole(self, direction: str, kernel: str, handed: bool) -> Cost | None:
        return price(direction, kernel, self.place, tune=self.tune, handed=handed, table=self.table)

    # -- directions -------------------------------------------------------------------------------

    def alone(self, direction: str, kernel: str) -> Cost | None:
        """A direction that shares nothing: it has the half of the chain's gradient, in bf16."""
        return self._kept(("alone", direction, kernel), lambda: self._alone(direction, kernel))

    def _alone(self, direction: str, kernel: str) -> Cost | None:
        if not self.apart:
            return self._whole(direction, kernel, False)
        if direction == "fwd":
            return self.fwd(kernel)
        half = half_of(self.gradient(None))
        return add([self.back(direction, kernel), *([] if half is None else [half])])

    def fwd(self, kernel: str, handed: bool = False) -> Cost | None:
        """handed: x comes as e4m3; then with what the producer saves or pays to write that."""
        return self._kept(("fwd", kernel, handed), lambda: self._fwd(kernel, handed))

    def _fwd(self, kernel: str, handed: bool) -> Cost | None:
        if not self.apart:
            return self._whole("fwd", kernel, handed)
        keys = self._fixed_for(
            ("fwd", kernel, handed), lambda: forward_parts(self.place, kernel, handed)
        )
        costs = list(map(self._part, keys))
        if handed and self.producer is not None:
            costs.append(self.producer.hands("y8", instead_of="y"))
        return add(costs)

    def back(
        self, direction: str, kernel: str, *, ready: bool = False, x: str = PLAIN
    ) -> Cost | None:
        """dgrad or wgrad from dL/dz on. ready: dL/dz comes quantised; x: see `parts.PLAIN`."""
        what = ("back", direction, kernel, ready, x)
        return self._kept(what, lambda: self._back(direction, kernel, ready, x))

    def _back(self, direction: str, kernel: str, ready: bool, x: str) -> Cost | None:
        if not self.apart:
            return None if ready else self._whole(direction, kernel, x == HANDED)
        keys = self._fixed_for(
            (direction, kernel, ready, x),
            lambda: backward_parts(self.place, direction, kernel, ready, x),
        )
        costs = list(map(self._part, keys))
        if x == HANDED and self.producer is not None:
            costs.append(self.producer.hands("y8t", instead_of="y8"))
        return add(costs)

    # -- what several directions need -------------------------------------------------------------

    def gradient(self, rules: Pair | None) -> Cost | None:
        """The chain's own gradient, see `Place.gradient`; None for a site that is not fused."""
        if not self.place.has_gradient or not self.apart:
            return None
        if rules is not None and not self.place.own_gradient:
            return None
        return self._part(self.place.gradient(rules))

    def saved(self, tensor: str, rules: Pair) -> Cost:
        """What quantising `tensor` for both readers at once saves; 0 without rows."""
        # Without a book a kernel of ours may be timed for it, now or later.
        kept = self._kept if self.book is None else self._fixed_for
        return kept(("saved", tensor, rules), lambda: self._saved(tensor, rules))

    def _saved(self, tensor: str, rules: Pair) -> Cost:
        key = self.place.quantise(tensor, rules)
        if self.book is not None:
            known = self.book.knows_moving(Asked(key, self.place.dtype, self.place.device))
        else:
            known = self.table.find(key) is not None or self.table.fit(key) is not None
        # A kernel of ours is timed in no time; anything else would have to be compiled.
        may = self.book is None and self.tune == "auto" and self.place.device.type == "cuda"
        timed = key.library == "loka" and may
        if not self.apart or not (known or timed):
            return Cost(0.0, "")
        first, second = rules
        forms: tuple[Pair, ...] = (rules, (first, None), (None, second))
        costs = [self._part(self.place.quantise(tensor, form)) for form in forms]
        both, *each = (Cost(0.0, "") if c is None or c.us is None else c for c in costs)
        us, host = (sum(map(of, each)) - of(both) for of in (_us, _host))
        return Cost(max(us, 0.0), "", host=max(host, 0.0))

    def bounded(self, turned: bool) -> Cost | None:
        """What the norm before this site pays to write e4m3 for all that read its result."""
        return self._part(self.place.bounded(turned)) if self.apart else None

    def hands(self, out: str, instead_of: str) -> Cost:
        """What our own forward pays to write `out`; below zero where it writes less."""
        for recipe in LIBRARIES["loka"].recipes:
            kernel = chain.OWN + recipe
            keys = [self.place.gemm("fwd", kernel, o) for o in (out, instead_of)]
            one, other = map(self._part, keys)
            if any(cost is None or cost.source == "estimated" for cost in (one, other)):
                one, other = map(self._alike, keys)
            if one is not None and other is not None and one.us and other.us:
                return Cost(one.us - other.us, max(one.source, other.source, key=_SOURCES.index))
        return Cost(0.0, "estimated")

    def _alike(self, key: CostKey) -> Cost | None:
        """As expected, timed or not: of two forms of one kernel, the difference is what counts."""
        if self.book is None:
            return self._part(key)
        cost = self.book.expectation(Asked(key, self.place.dtype, self.place.device))
        self._open |= cost is None
        return cost


def half_of(cost: Cost | None) -> Cost | None:
    return None if cost is None or cost.us is None else cost.times(0.5)


_us: Callable[[Cost], float] = operator.attrgetter("us")
_host: Callable[[Cost], float] = operator.attrgetter("host")
