"""`make_plan(model, inputs)`: the plan before any training, and what it is predicted to gain.

Works on a copy: neither the model nor its decisions, gradients or random state change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.options import PROBE_STEPS
from loka_compile.plan import Plan
from loka_compile.plans import plan_of


@dataclass(frozen=True)
class Prediction:
    """Microseconds per step in priced GEMMs: all in high precision, and as planned.

    rows: (site, direction, kernel, high us, planned us), the most expensive first. unpriced:
    directions without a price, which count in neither sum.
    """

    high_us: float
    planned_us: float
    rows: tuple[tuple[str, str, str, float, float], ...]
    unpriced: int

    @property
    def speedup(self) -> float | None:
        """Of the priced GEMMs; None where nothing has a price."""
        return self.high_us / self.planned_us if self.planned_us else None


def predict(plan: Plan) -> Prediction:
    """What `plan` gains over high precision, from the prices that stand in it."""
    rows = []
    unpriced = 0
    for site in plan.sites.values():
        for direction in DIRECTIONS:
            choice = site.choice(direction)
            if choice.us is None or not choice.speedup:
                unpriced += site.count
                continue
            high = choice.us * choice.speedup * site.count
            planned = choice.us * site.count if choice.is_low else high
            rows.append((site.name, direction, choice.kernel, high, planned))
    rows.sort(key=lambda row: -row[4])
    return Prediction(sum(r[3] for r in rows), sum(r[4] for r in rows), tuple(rows), unpriced)


def make_plan(
    model: torch.nn.Module,
    inputs: Tensor | Sequence[Any],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    batches: Sequence[Sequence[Any]] = (),
    options: Mapping[str, Any] | None = None,
) -> Plan:
    """Probe a copy of `model` for a few steps and decide, as the first steps of a training would.

    inputs: positional arguments of one call; batches: more of them, taken in turn. loss: result ->
    scalar; by default the mean of squares of the first tensor, which says little about gradients:
    give the real one. options: as for torch.compile.
    """
    own = copy.deepcopy(model)
    calls = [(inputs,) if isinstance(inputs, Tensor) else tuple(inputs), *map(tuple, batches)]
    chosen = {"inner": "aot_eager", **(options or {})}
    with torch.random.fork_rng(), torch.enable_grad():
        compiled = torch.compile(own, backend="loka", options=chosen)
        # One step more: the plan is made at its start.
        for step in range(PROBE_STEPS + 1):
            arguments = [_leaf(a) for a in calls[step % len(calls)]]
            result = compiled(*arguments)
            (loss or _mean_square)(result).backward()
            own.zero_grad(set_to_none=True)
    return plan_of(own)


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _mean_square(result: Any) -> Tensor:
    first = result if isinstance(result, Tensor) else next(iter(result))
    return first.float().square().mean()
