"""From which batch on a kernel pays at a site: what reports say about M, by rows and estimates."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace

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


def latency_of_parts(parts: Sequence[Part], table: CostTable, itemsize: int) -> Latency | None:
    """The sum of parts; None where one is not known at two sizes."""
    found: list[tuple[Latency, float]] = []
    for key, share, grows in parts:
        one = latency(key, table, itemsize)
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


def say(
    direction: str,
    kernel: str,
    place: Place,
    speedup: float,
    table: CostTable | None = None,
    rules: Pair | None = None,
) -> str:
    """`FP8 pays from M = 812`, or "" where two sizes of M are not known for both kernels."""
    table = default_table() if table is None else table
    itemsize = place.dtype.itemsize
    fast, slow = (
        latency_of_parts(parts_of(direction, name, place, written), table, itemsize)
        for name, written in ((kernel, rules), (HIGH_PRECISION, None))
    )
    if fast is None or slow is None:
        # Rows of whole directions, then.
        fast, slow = (
            latency(place.key(direction, name), table) for name in (kernel, HIGH_PRECISION)
        )
    if fast is None or slow is None:
        return ""
    least = _break_even(fast, slow, max(speedup, 1.0))
    if least is None:
        return "FP8 pays at no M"
    return "FP8 pays at every M" if least <= 1 else f"FP8 pays from M = {least}"


def with_break_even(
    chosen: Mapping[str, Choice],
    place: Place,
    options: Options,
    table: CostTable | None = None,
) -> dict[str, Choice]:
    """`chosen` with the break-even batch in the reason of every direction that was timed."""
    found = dict(chosen)
    kernels = (chosen[d].kernel if d in chosen else HIGH_PRECISION for d in DIRECTIONS)
    rules = chain.backward_rules(*kernels) if place.has_gradient else None
    for direction in DIRECTIONS:
        choice = found.get(direction)
        if choice is None or choice.us is None or options.emulate:
            continue
        kernel = choice.kernel if choice.is_fp8 else choice.reason.partition(": ")[0]
        said = say(direction, kernel, place, options.min_speedup, table, rules)
        reason = "; ".join(filter(None, (choice.reason, said)))
        found[direction] = replace(choice, reason=reason)
    return found
