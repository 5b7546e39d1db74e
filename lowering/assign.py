"""Which option each slot takes, over a whole chain: a small integer programme.

A slot is one direction of one site; its options are the kernels that may run there. What couples
slots: an option may need one of some options of another slot (a consumer reads e4m3 only if its
producer hands it over), and a loss budget bounds the sum of all scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """us: its price. score: its share of the loss budget, zero or more.

    needs: (slot, option numbers): one of those must be chosen there for this one to be allowed.
    """

    us: float
    score: float = 0.0
    needs: tuple[int, frozenset[int]] | None = None


class InfeasibleError(ValueError):
    """No choice satisfies the couplings and the budget."""


def solve(slots: Sequence[Sequence[Option]], budget: float | None = None) -> list[int]:
    """The number of the chosen option per slot, for the least sum of `us`.

    Raises InfeasibleError when nothing fits, which high precision with score 0 in every slot rules
    out.
    """
    if any(not options for options in slots):
        raise InfeasibleError("a slot without options")
    if not slots:
        return []
    if budget is None and not any(o.needs for options in slots for o in options):
        return [min(range(len(s)), key=lambda i: (s[i].us, i)) for s in slots]
    return _programme(slots, budget)


def _programme(slots: Sequence[Sequence[Option]], budget: float | None) -> list[int]:
    import numpy as np
    from scipy.optimize import Bounds
    from scipy.optimize import LinearConstraint
    from scipy.optimize import milp
    from scipy.sparse import lil_matrix

    starts = np.cumsum([0, *(len(s) for s in slots)])
    total = int(starts[-1])
    flat = [option for options in slots for option in options]
    cost = np.array([o.us for o in flat])
    one = lil_matrix((len(slots), total))
    for i in range(len(slots)):
        one[i, starts[i] : starts[i + 1]] = 1.0
    constraints = [LinearConstraint(one.tocsr(), 1.0, 1.0)]
    needing = [(i, o.needs) for i, o in enumerate(flat) if o.needs is not None]
    if needing:
        rows = lil_matrix((len(needing), total))
        for row, (i, (slot, numbers)) in enumerate(needing):
            rows[row, i] = 1.0
            for number in numbers:
                rows[row, starts[slot] + number] -= 1.0
        constraints.append(LinearConstraint(rows.tocsr(), -np.inf, 0.0))
    allowed = np.ones(total)
    if budget is not None:
        # Scaled to 1: scores of 1e-9 would drown in the solver's tolerance.
        scale = budget if budget > 0 else 1.0
        scores = np.array([[o.score / scale for o in flat]])
        # The solver's tolerance is 1e-6; a budget is a promise.
        limit = budget / scale * (1 - 1e-6)
        constraints.append(LinearConstraint(scores, -np.inf, limit))
        allowed[scores[0] > limit] = 0.0
    found = milp(
        cost / max(float(cost.max()), 1e-30),
        constraints=constraints,
        integrality=np.ones(total),
        bounds=Bounds(0.0, allowed),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise InfeasibleError(f"no choice fits: {found.message}")
    chosen = [int(np.argmax(found.x[starts[i] : starts[i + 1]])) for i in range(len(slots))]
    return chosen


def total_us(slots: Sequence[Sequence[Option]], chosen: Sequence[int]) -> float:
    return math.fsum(options[i].us for options, i in zip(slots, chosen, strict=True))
