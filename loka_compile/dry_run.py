"""`make_plan(model, inputs)`: the plan before any training, and what it is predicted to gain.

Works on a copy: neither the model nor its decisions, gradients or random state change.
"""

from __future__ import annotations

import copy
import statistics
import time
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

#: Steps before a step is timed: the first ones compile.
WARM_STEPS = 5


@dataclass(frozen=True)
class Prediction:
    """Microseconds per step in priced GEMMs: all in high precision, and as planned.

    rows: (site, direction, kernel, high us, planned us), the most expensive first. unpriced:
    directions without a price, which count in neither sum. step_us: of a whole step in high
    precision, None where that was not measured.
    """

    high_us: float
    planned_us: float
    rows: tuple[tuple[str, str, str, float, float], ...]
    unpriced: int
    step_us: float | None = None

    @property
    def speedup(self) -> float | None:
        """Of the priced GEMMs; None where nothing has a price."""
        return self.high_us / self.planned_us if self.planned_us else None

    @property
    def planned_step_us(self) -> float | None:
        """Of a whole step as planned: what no price is for takes as long as before."""
        if self.step_us is None or self.speedup is None:
            return None
        # Prices are of kernels one by one: their sum may be more than a step that overlaps them.
        rest = max(self.step_us - self.high_us, 0.0)
        return rest + self.planned_us


def predict(plan: Plan, step_us: float | None = None) -> Prediction:
    """What `plan` gains over high precision, from the prices that stand in it.

    step_us: of a step in high precision, see `measure_step`.
    """
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
    high_us, planned_us = sum(r[3] for r in rows), sum(r[4] for r in rows)
    return Prediction(high_us, planned_us, tuple(rows), unpriced, step_us)


def make_plan(
    model: torch.nn.Module,
    inputs: Tensor | Sequence[Any],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    batches: Sequence[Sequence[Any]] = (),
    options: Mapping[str, Any] | None = None,
) -> Plan:
    """Probe a copy of `model` for a few steps and decide, as the first steps of a training would;
    but what the host needs beside the linears is not measured here, as it runs uncompiled.

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


def measure_step(
    model: torch.nn.Module,
    inputs: Tensor | Sequence[Any],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    steps: int = 20,
) -> float:
    """Median microseconds of a training step (forward and backward, no optimizer) of a copy of
    `model` with everything in high precision: what a plan is to improve on.

    Arguments as of `make_plan`; compiled as `options` say, Mods included.
    """
    own = copy.deepcopy(model)
    call = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    device = next((p.device for p in own.parameters()), torch.device("cpu"))
    chosen = {**(options or {}), "exclude": ("*",), "force": {}, "probe_every": 0}
    times = []
    with torch.random.fork_rng(), torch.enable_grad():
        compiled = torch.compile(own, backend="loka", options=chosen)
        for step in range(WARM_STEPS + steps):
            arguments = [_leaf(a) for a in call]
            own.zero_grad(set_to_none=True)
            _synchronize(device)
            begun = time.perf_counter()
            (loss or _mean_square)(compiled(*arguments)).backward()
            _synchronize(device)
            if step >= WARM_STEPS:
                times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _mean_square(result: Any) -> Tensor:
    first = result if isinstance(result, Tensor) else next(iter(result))
    return first.float().square().mean()
