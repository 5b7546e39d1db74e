"""What the programme's answer says of one direction, beside what it did not take."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loka_compile.lowering.entries import Entry
from loka_compile.lowering.entries import Outcome
from loka_compile.lowering.measure import Cost


def outcome(
    forms: Sequence[Entry],
    taken: Entry,
    paid: Cost,
    saved: Sequence[Cost],
    steps: Cost,
    own: Sequence[Cost],
    share: float,
) -> Outcome:
    """`taken` out of `forms`. paid: for the chain's gradient, of which a direction has half.

    saved: by what it shares, below zero. steps, own: the gradient in bf16, and each way in which
    our kernel may write it. share: see `Cost.at`.
    """
    ready = min(own, key=lambda cost: cost.at(share), default=steps)
    counts: dict[bool, list[tuple[float, str, float]]] = {True: [], False: []}
    for form in forms:
        us, host = _sums([form.cost, (ready if form.ready else steps).times(0.5)])
        weighed = Cost(us, "", host=host).at(share)
        counts[form.is_fp8].append((weighed, form.kernel, us))
    low, best, best_us = min(counts[True], default=(0.0, "", None))
    high, _, high_us = min(counts[False], default=(0.0, "", 0.0))
    us, host = _sums([taken.cost, paid.times(0.5), *saved])
    gain = high / low if low else None
    source = taken.cost.source
    return Outcome(taken.kernel, us, high_us, source, best, best_us, host, gain, share < 1.0)


def _sums(costs: Sequence[Cost]) -> tuple[float, float]:
    """Of the device and of the host."""
    return math.fsum(cost.us or 0.0 for cost in costs), math.fsum(cost.host for cost in costs)
