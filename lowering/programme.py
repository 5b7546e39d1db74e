"""The choice of all sites as one integer programme: what each slot may take, what couples slots.

Per site a slot for fwd, dgrad and wgrad and, in a fused chain, one for the chain's gradient:
    * our backward kernel writes dL/dz as FP8 for both GEMMs, behind our own forward and before two
      kernels that read it; else Inductor writes it in bf16, and who wants FP8 quantises it. It is
      a slot of its own, so its cost counts once. It runs wherever it can: that is no choice
    * a producer that is our own kernel hands e4m3 to a forward that takes it, always; a wgrad in
      FP8 then reads the transposed copy, any other one widens what was handed
    * a norm on its own hands e4m3 to every forward that takes it, always; in training only where
      that site's wgrad takes it as well. It writes it once for all that read it
    * a tensor that is quantised for two GEMMs is read once, where rows say what that saves

An FP8 option counts for `min_speedup` times its cost, so that a gain which several directions make
together is held to the same bar as the gain of one. What a microsecond of the device and one of the
host are worth is given (`balance.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence

from loka_compile.lowering import assign
from loka_compile.lowering.assign import Clash
from loka_compile.lowering.assign import Option
from loka_compile.lowering.assign import Part
from loka_compile.lowering.assign import Shared
from loka_compile.lowering.chain import gradient_rule
from loka_compile.lowering.entries import BACKWARD
from loka_compile.lowering.entries import Entry
from loka_compile.lowering.entries import Kernel
from loka_compile.lowering.entries import Outcome
from loka_compile.lowering.entries import Slot
from loka_compile.lowering.entries import Want
from loka_compile.lowering.entries import could_read
from loka_compile.lowering.entries import gradient_pairs
from loka_compile.lowering.entries import input_is
from loka_compile.lowering.entries import is_own
from loka_compile.lowering.entries import operand_of
from loka_compile.lowering.entries import quantises
from loka_compile.lowering.entries import reads
from loka_compile.lowering.entries import takes_e4m3
from loka_compile.lowering.entries import writes
from loka_compile.lowering.measure import Cost
from loka_compile.lowering.outcomes import outcome
from loka_compile.lowering.parts import HANDED
from loka_compile.lowering.parts import PLAIN
from loka_compile.lowering.parts import WIDENED
from loka_compile.lowering.parts import Pair
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.recipes import Operand
from loka_compile.lowering.site_prices import SitePrices
from loka_compile.lowering.site_prices import add

GRADIENT = "gradient"


class Programme:
    """`add` sites, producers before their readers; `solve` answers for all of them."""

    def __init__(self, min_speedup: float = 1.0, share: float = 1.0) -> None:
        """share: of the device in what counts, see `Cost.at`."""
        self.factor = min_speedup if min_speedup > 0 else 1.0
        self.share = share
        self.entries: dict[Slot, list[Entry]] = {}
        self._steps: dict[str, Cost] = {}
        self._clashes: list[tuple[Want, ...]] = []
        self._shared: list[tuple[Cost, tuple[Want, ...]]] = []
        #: Result of a norm -> what writing it as e4m3 costs, and the forwards that may read that.
        self._bounded: dict[str, tuple[Cost, list[Want]]] = {}

    # -- one site ---------------------------------------------------------------------------------

    def add(
        self,
        site: str,
        kernels: Mapping[str, Sequence[Kernel]],
        prices: SitePrices,
        producer: str | None = None,
        bounded: str | None = None,
        trains: bool = True,
    ) -> None:
        """kernels: direction -> all that it may take, high precision among it.

        bounded: the result of a norm on its own that the site reads. trains: it has a backward.
        """
        handed = self._add_forward(site, kernels["fwd"], prices, producer)
        if bounded is not None:
            handed = self._add_bounded(site, kernels, prices, bounded, trains)
        pairs: dict[Pair, Cost] = {}
        if any(map(is_own, self.entries[site, "fwd"])):
            pairs = gradient_pairs(kernels, prices)
        for direction in BACKWARD:
            fed = handed and trains and direction == "wgrad"
            forms = [PLAIN, *([HANDED] if fed else []), *([WIDENED] if fed and not bounded else [])]
            self._add_backward(site, direction, kernels[direction], prices, forms, pairs)
        steps = prices.gradient(None)
        self._steps[site] = steps if steps is not None and steps.us is not None else Cost(0.0, "")
        if pairs and steps is not None:
            self._add_gradient(site, steps, pairs)
        self._share(site, "x", "fwd", "wgrad", prices)
        self._share(site, "w", "fwd", "dgrad", prices)
        self._share(site, "gy", "dgrad", "wgrad", prices)

    def _add_forward(
        self, site: str, kernels: Sequence[Kernel], prices: SitePrices, producer: str | None
    ) -> bool:
        """Whether some entry takes its input as e4m3."""
        self._put((site, "fwd"), kernels, kernels, prices.fwd)
        source = (producer or "", "fwd")
        if not any(map(is_own, self.entries.get(source, ()))):
            return False
        takers = [k for k in kernels if takes_e4m3(k.name, "fwd")]
        producer_is_own: Want = (source, is_own)
        handed = self._put(
            (site, "fwd"),
            kernels,
            takers,
            lambda k: prices.fwd(k, True),
            x=HANDED,
            needs=(producer_is_own,),
        )
        names = {e.kernel for e in handed}
        if handed:
            plain: Want = ((site, "fwd"), lambda e: e.x == PLAIN and e.kernel in names)
            self._clashes.append((producer_is_own, plain))
        return bool(handed)

    def _add_bounded(
        self,
        site: str,
        kernels: Mapping[str, Sequence[Kernel]],
        prices: SitePrices,
        value: str,
        trains: bool,
    ) -> bool:
        """The same where the input is the result of a norm on its own."""
        written = prices.bounded(trains)
        turning = [k for k in kernels["wgrad"] if takes_e4m3(k.name, "wgrad")]
        if written is None or written.us is None or (trains and not turning):
            return False
        forward, wgrad = (site, "fwd"), (site, "wgrad")
        needs: tuple[Want, ...] = ((wgrad, input_is(HANDED)),) if trains else ()
        takers = [k for k in kernels["fwd"] if takes_e4m3(k.name, "fwd")]

        def cost_of(kernel: str) -> Cost | None:
            return add([prices.fwd(kernel, True), written])

        handed = self._put(forward, kernels["fwd"], takers, cost_of, x=HANDED, needs=needs)
        if not handed:
            return False
        names = {e.kernel for e in handed}
        plain: Want = (forward, lambda e: e.x == PLAIN and e.kernel in names)
        could: Want = (wgrad, lambda e: e.x == PLAIN and takes_e4m3(e.kernel, "wgrad"))
        self._clashes.append((plain, could) if trains else (plain,))
        _, readers = self._bounded.setdefault(value, (written, []))
        readers.append((forward, input_is(HANDED)))
        return True

    def _add_backward(
        self,
        site: str,
        direction: str,
        kernels: Sequence[Kernel],
        prices: SitePrices,
        forms: Sequence[str],
        pairs: Mapping[Pair, Cost],
    ) -> None:
        """forms: how x may come."""
        side = BACKWARD.index(direction)
        written = {rules[side] for rules in pairs}
        fed = len(forms) > 1
        for x in forms:
            able = [
                k for k in kernels if x == PLAIN or takes_e4m3(k.name, "wgrad") == (x == HANDED)
            ]
            needs = (((site, "fwd"), input_is(PLAIN if x == PLAIN else HANDED)),) if fed else ()
            for ready in (False, True):
                some = [k for k in able if not ready or gradient_rule(direction, k.name) in written]

                def cost_of(kernel: str, ready: bool = ready, x: str = x) -> Cost | None:
                    return prices.back(direction, kernel, ready=ready, x=x)

                found = self._put((site, direction), kernels, some, cost_of, x, ready, needs)
                for entry in found if ready else ():
                    rule = gradient_rule(direction, entry.kernel)
                    entry.needs = (*needs, ((site, GRADIENT), writes(side, rule)))

    def _add_gradient(self, site: str, steps: Cost, pairs: Mapping[Pair, Cost]) -> None:
        forward: Want = ((site, "fwd"), is_own)
        mine = [Entry(HIGH_PRECISION, steps)]
        for rules, cost in pairs.items():
            readers = (((site, d), reads(d, rules[i])) for i, d in enumerate(BACKWARD))
            mine.append(Entry(HIGH_PRECISION, cost, rules=rules, needs=(forward, *readers)))
        self.entries[site, GRADIENT] = mine
        # Where our kernel could write it, it does.
        able = (((site, d), could_read(d, {r[i] for r in pairs})) for i, d in enumerate(BACKWARD))
        self._clashes.append((forward, *able))

    def _share(self, site: str, tensor: str, one: str, other: str, prices: SitePrices) -> None:
        for first in self._rules(site, one, tensor):
            for second in self._rules(site, other, tensor):
                saved = prices.saved(tensor, (first, second))
                if saved.at(self.share) > 0:
                    users = (
                        ((site, one), quantises(one, tensor, first)),
                        ((site, other), quantises(other, tensor, second)),
                    )
                    self._shared.append((saved, users))

    def _rules(self, site: str, direction: str, tensor: str) -> list[Operand]:
        found = {operand_of(direction, tensor, e.kernel) for e in self.entries[site, direction]}
        return sorted(filter(None, found), key=str)

    def _put(
        self,
        slot: Slot,
        every: Sequence[Kernel],
        some: Iterable[Kernel],
        cost_of: Callable[[str], Cost | None],
        x: str = PLAIN,
        ready: bool = False,
        needs: tuple[Want, ...] = (),
    ) -> list[Entry]:
        made = []
        for kernel in some:
            cost = cost_of(kernel.name)
            if cost is None or cost.us is None:
                if len(every) > 1:
                    continue
                # There is nothing to choose; it may still feed a neighbour.
                cost = Cost(0.0, "")
            made.append(Entry(kernel.name, cost, kernel.score, x, ready, None, needs))
        self.entries.setdefault(slot, []).extend(made)
        return made

    # -- all sites --------------------------------------------------------------------------------

    def solve(self, budget: float | None = None) -> dict[Slot, Outcome]:
        """(site, direction) -> what it took."""
        slots = list(self.entries)
        at = {slot: i for i, slot in enumerate(slots)}

        def part(want: Want) -> Part:
            slot, test = want
            mine = self.entries[slot]
            return at[slot], frozenset(i for i, e in enumerate(mine) if test(e))

        several = [(cost, tuple(wants)) for cost, wants in self._bounded.values() if len(wants) > 1]
        once = [*self._shared, *several]
        shared = []
        spared: dict[tuple[int, int], float] = {}
        for cost, wants in once:
            us, users = cost.at(self.share), tuple(map(part, wants))
            shared.append(Shared(us * self.factor, users))
            for number, some in users:
                for i in some:
                    spared[number, i] = spared.get((number, i), 0.0) + us
        options = []
        for number, slot in enumerate(slots):
            own = []
            for i, entry in enumerate(self.entries[slot]):
                us = entry.cost.at(self.share) - spared.get((number, i), 0.0)
                weighed = us * self.factor if entry.is_fp8 else us
                own.append(Option(weighed, entry.score, tuple(map(part, entry.needs))))
            options.append(own)
        clashes = [Clash(tuple(map(part, wants))) for wants in self._clashes]
        numbers = assign.solve(options, budget, shared, clashes)
        chosen = {slot: self.entries[slot][i] for slot, i in zip(slots, numbers, strict=True)}
        both: dict[Slot, list[Cost]] = {}
        for cost, wants in once:
            asked = [slot for slot, test in wants if test(chosen[slot])]
            for slot in asked:
                both.setdefault(slot, []).append(cost.times((1 - len(asked)) / len(asked)))
        return {
            slot: self._outcome(slot, entry, chosen, both.get(slot, []))
            for slot, entry in chosen.items()
            if slot[1] in DIRECTIONS
        }

    def _outcome(
        self, slot: Slot, entry: Entry, chosen: Mapping[Slot, Entry], saved: Sequence[Cost]
    ) -> Outcome:
        site, direction = slot
        steps = self._steps[site] if direction in BACKWARD else Cost(0.0, "")
        gradients = self.entries.get((site, GRADIENT), [])
        taken = chosen.get((site, GRADIENT))
        paid = steps if taken is None or direction == "fwd" else taken.cost
        own = [e.cost for e in gradients if e.rules is not None]
        mine = self.entries[slot]
        return outcome(mine, entry, paid, saved, steps, own, self.share)
