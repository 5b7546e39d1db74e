"""From which batch on a kernel pays at a site: what reports say about M, by rows and estimates."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from loka_compile.lowering.cost_store import CostTable
from loka_compile.lowering.cost_store import default_table
from loka_compile.lowering.cost_table import CostKey
from loka_compile.lowering.latency_model import GRID
from loka_compile.lowering.latency_model import Latency
from loka_compile.lowering.latency_model import break_even
from loka_compile.lowering.latency_model import latency_of
from loka_compile.lowering.measure import Place
from loka_compile.lowering.measure import estimated
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.options import Options
from loka_compile.plan import Choice

_break_even = functools.lru_cache(maxsize=4096)(break_even)


def latency(key: CostKey, table: CostTable) -> Latency | None:
    """In M, at `key`'s K and N: rows where there are some, estimates in between."""
    rows = table.points(key)

    def us_at(m: int) -> float | None:
        if m in rows:
            return rows[m]
        cost = estimated(replace(key, m=m), table)
        return None if cost is None else cost.us

    found = latency_of(us_at, sorted({*GRID, *rows}))
    return found if found is not None and len(found.knots) > 1 else None


def say(
    direction: str, kernel: str, place: Place, speedup: float, table: CostTable | None = None
) -> str:
    """`FP8 pays from M = 812`, or "" where two sizes of M are not known for both kernels."""
    table = default_table() if table is None else table
    keys = (place.key(direction, kernel), place.key(direction, HIGH_PRECISION))
    fast, slow = (latency(key, table) for key in keys)
    if fast is None or slow is None:
        return ""
    least = _break_even(fast, slow, max(speedup, 1.0))
    what = "BF16" if kernel.startswith("bf16:") else "FP8"
    if least is None:
        return f"{what} pays at no M"
    return f"{what} pays at every M" if least <= 1 else f"{what} pays from M = {least}"


def with_break_even(
    chosen: Mapping[str, Choice],
    place: Place,
    options: Options,
    table: CostTable | None = None,
) -> dict[str, Choice]:
    """`chosen` with the break-even batch in the reason of every direction that was timed."""
    found = dict(chosen)
    for direction in DIRECTIONS:
        choice = found.get(direction)
        if choice is None or choice.us is None or options.emulate:
            continue
        kernel = choice.kernel if choice.is_low else choice.reason.partition(": ")[0]
        said = say(direction, kernel, place, options.min_speedup, table)
        reason = "; ".join(filter(None, (choice.reason, said)))
        found[direction] = replace(choice, reason=reason)
    return found
