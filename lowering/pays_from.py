"""From which batch on a kernel pays at a site: what reports say about M, by rows and estimates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from loka_compile.lowering import chain
from loka_compile.lowering.cost_store import CostTable
from loka_compile.lowering.cost_store import default_table
from loka_compile.lowering.cost_table import CostKey
from loka_compile.lowering.latency_model import GRID
from loka_compile.lowering.latency_model import Latency
from loka_compile.lowering.latency_model import break_even
from loka_compile.lowering.latency_model import latency_of
from loka_compile.lowering.measure import estimated
from loka_compile.lowering.parts import MEMORY_BOUND
from loka_compile.lowering.parts import Pair
from loka_compile.lowering.parts import Place
from loka_compile.lowering.parts import backward_parts
from loka_compile.lowering.parts import forward_parts
from loka_compile.lowering.parts import guess_us
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.options import Options
from loka_compile.plan import Choice

#: A key, how much of it counts, and whether it grows with the batch (a weight does not).
Part = tuple[CostKey, float, bool]

_break_even = functools.lru_cache(maxsize=4096)(break_even)


def latency(key: CostKey, table: CostTable, itemsize: int = 2) -> Latency | None:
    """In M, at `key`'s K and N: rows where there are some, estimates in between."""
    rows = table.points(key)

    def us_at(m: int) -> float | None:
        if m in rows:
            return rows[m]
        cost = estimated(replace(key, m=m), table)
        if cost is not None:
            return cost.us
        # Beside rows a guess would only bend the line between them.
        guessed = key.direction in MEMORY_BOUND and not rows
        return guess_us(replace(key, m=m), itemsize) if guessed else None

    found = latency_of(us_at, sorted({*GRID, *rows}))
    return found if found is not None and len(found.knots) > 1 else None


def latency_of_parts(
    parts: Sequence[Part], latency_of_key: Callable[[CostKey], Latency | None]
) -> Latency | None:
    """The sum of parts; None where one is not known at two sizes."""
    found: list[tuple[Latency, float]] = []
    for key, share, grows in parts:
        one = latency_of_key(key)
        if one is None:
            return None
        if not grows:
            one = Latency.of({1: one.at(key.m)})
        found.append((one, share))
    knots = sorted({at for one, _ in found for at, _ in one.knots})
    return Latency.of({at: sum(one.at(at) * share for one, share in found) for at in knots})


def parts_of(direction: str, kernel: str, place: Place, rules: Pair | None) -> list[Part]:
    """What one direction is made of. rules: dL/dz as our backward kernel writes it, None where it
    does not run."""
    doubled = replace(place, shape=replace(place.shape, m=2 * place.shape.m))
    here, there = (_keys(direction, kernel, at, rules) for at in (place, doubled))
    parts = [(key, 1.0, key != other) for key, other in zip(here, there, strict=True)]
    if direction != "fwd" and place.has_gradient:
        parts.append((place.gradient(rules), 0.5, True))
    return parts


def _keys(direction: str, kernel: str, place: Place, rules: Pair | None) -> list[CostKey]:
    if direction == "fwd":
        return forward_parts(place, kernel)
    return backward_parts(place, direction, kernel, ready=rules is not None)


class PaysFrom:
    """Answers of one table while it does not change: sites share kernels, and kernels parts."""

    def __init__(self, table: CostTable | None = None) -> None:
        self.table = default_table() if table is None else table
        self._latencies: dict[tuple[CostKey, int], Latency | None] = {}
        self._said: dict[tuple[Any, ...], str] = {}

    def latency(self, key: CostKey, itemsize: int) -> Latency | None:
        if (key, itemsize) not in self._latencies:
            self._latencies[key, itemsize] = latency(key, self.table, itemsize)
        return self._latencies[key, itemsize]

    def say(
        self, direction: str, kernel: str, place: Place, speedup: float, rules: Pair | None = None
    ) -> str:
        """`FP8 pays from M = 812`, or "" where two sizes of M are not known for both kernels."""
        asked = direction, kernel, place, speedup, rules
        if asked not in self._said:
            self._said[asked] = self._solved(*asked)
        return self._said[asked]

    def _solved(
        self, direction: str, kernel: str, place: Place, speedup: float, rules: Pair | None
    ) -> str:
        itemsize = place.dtype.itemsize

        def of(key: CostKey) -> Latency | None:
            return self.latency(key, itemsize)

        fast, slow = (
            latency_of_parts(parts_of(direction, name, place, written), of)
            for name, written in ((kernel, rules), (HIGH_PRECISION, None))
        )
        if fast is None or slow is None:
            # Rows of whole directions, then.
            fast, slow = (of(place.key(direction, name)) for name in (kernel, HIGH_PRECISION))
        if fast is None or slow is None:
            return ""
        least = _break_even(fast, slow, max(speedup, 1.0))
        what = "BF16" if kernel.startswith("bf16:") else "FP8"
        if least is None:
            return f"{what} pays at no M"
        return f"{what} pays at every M" if least <= 1 else f"{what} pays from M = {least}"


def say(
    direction: str,
    kernel: str,
    place: Place,
    speedup: float,
    table: CostTable | None = None,
    rules: Pair | None = None,
) -> str:
    """See `PaysFrom.say`."""
    return PaysFrom(table).say(direction, kernel, place, speedup, rules)


def with_break_even(
    chosen: Mapping[str, Choice],
    place: Place,
    options: Options,
    pays: PaysFrom,
) -> dict[str, Choice]:
    """`chosen` with the break-even batch in the reason of every direction that was timed."""
    found = dict(chosen)
    kernels = (chosen[d].kernel if d in chosen else HIGH_PRECISION for d in DIRECTIONS)
    rules = chain.backward_rules(*kernels) if place.own_gradient else None
    for direction in DIRECTIONS:
        choice = found.get(direction)
        if choice is None or choice.us is None or options.emulate:
            continue
        kernel = choice.kernel if choice.is_low else choice.reason.partition(": ")[0]
        said = pays.say(direction, kernel, place, options.min_speedup, rules)
        reason = "; ".join(filter(None, (choice.reason, said)))
        found[direction] = replace(choice, reason=reason)
    return found
