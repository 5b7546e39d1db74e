"""`calibrate(model, batches)`: what the Probe learns in training, for models that are only served.

The same state is filled (inputs and weights; there are no gradients), by the same observers, and
the forward of every site is decided from it. Nothing is trained: no gradient, no optimizer, modules
in eval mode. A model that is compiled already is looked at from below: its own compiled code stays
as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch import fx
from torch import nn

from loka_compile import _compat
from loka_compile.binder import Binder
from loka_compile.capture import capture
from loka_compile.decisions import Decisions
from loka_compile.errors import LokaError
from loka_compile.fresh_state import empty_state
from loka_compile.ledger import LEDGER
from loka_compile.ledger import Entry
from loka_compile.lowering.libraries import LIBRARIES
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.names import Site
from loka_compile.options import Environment
from loka_compile.options import Options
from loka_compile.passes.observe import StateKey
from loka_compile.plan import Choice
from loka_compile.plan import Plan
from loka_compile.plan import SitePlan
from loka_compile.plans import plan_of
from loka_compile.probe.statistics import Statistics
from loka_compile.runtime import Runtime

Batch = Tensor | list[Any] | tuple[Any, ...] | Mapping[str, Any]

_FORWARD_ONLY = Choice(reason="calibrated without gradients: only the forward was decided")


class NothingCalibratedError(LokaError):
    """No batch, or no linear in what the batches ran through."""


def calibrate(
    model: nn.Module, batches: Iterable[Batch], *, options: Mapping[str, Any] | None = None
) -> Plan:
    """Run `batches` through `model` without gradients, record, and decide every forward.

    model: plain or compiled; its modules are put into eval mode meanwhile. batches: each one a
    tensor, a sequence of positional arguments or a mapping of keyword arguments; eight or more, of
    the size that will be served. options: as for torch.compile; with `plan`, its Mods are in force,
    with `probe_dir` the state is saved there for `loka quantify`.

    Returns a plan for `torch.compile(model, backend="loka", options={"plan": plan})`, in which
    dgrad and wgrad stay in high precision. `loka_compile.quantify(model)` finds what was recorded.
    Decisions that a training has made for the model stay as they are.

    Raises NothingCalibratedError when no linear ran, and what an option that is wrong raises.
    """
    given = {"mode": None, **(options or {}), "inner": "eager"}
    parsed = Options.parse(given)
    parsed.check_names(LIBRARIES, {r for lib in LIBRARIES.values() for r in lib.recipes})
    plan = Plan.of_option(parsed.plan)
    if plan is not None:
        parsed = replace(parsed, block=parsed.block or plan.block, heads=parsed.heads or plan.heads)
    plain = getattr(model, "_orig_mod", model)
    graphs: list[_Calibrating] = []
    environment = Environment.read()

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        real = _compat.real_inputs(gm, inputs)
        source = capture(gm, real, parsed, plan)
        if not source.sites:
            return gm
        one = _Calibrating(source, parsed, plan, environment)
        one.prepare(real, inputs)
        graphs.append(one)
        return one

    with _serving(plain), torch.no_grad():
        run = torch.compile(plain, backend=backend)
        for batch in batches:
            _call(run, batch)
    sites: dict[str, SitePlan] = {}
    for one in graphs:
        sites.update(one.decided())
    if not sites:
        raise NothingCalibratedError(
            "calibrate: no linear that FP8 could run was seen; check that `batches` is not empty "
            "and that the model is not all heads or excluded"
        )
    if graphs[0].probe.folder is not None:
        graphs[0].probe.save()
    found = plan_of(plain)
    return replace(found, sites=sites, emulated=parsed.emulate, replayed_nats=None)


class _ForwardDecisions(Decisions):
    """Observes every site, whatever was decided before, and keeps what it decides to itself."""

    directions = ("fwd",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.found: dict[str, SitePlan] = {}

    def known(self, weights: Mapping[str, Tensor]) -> dict[str, SitePlan]:
        return {}

    def to_observe(self, site_plans: Mapping[str, SitePlan]) -> frozenset[str]:
        return self.eligible

    def record(self, entry: Entry, call: int, plan: SitePlan, nats: float | None) -> None:
        high = {d: _FORWARD_ONLY for d in DIRECTIONS if d not in plan.directions}
        self.found[plan.name] = replace(plan, directions={**plan.directions, **high})


class _InputBinder(Binder):
    def _state(self, key: StateKey, site: Site, weight: Tensor) -> Statistics:
        """Inputs go where a training would record them; gradients, which never come, nowhere."""
        held, slot = LEDGER.entry(weight).statistics, (site.call, key.role)
        if key.role == "g":
            return empty_state(key, site, weight)
        if slot not in held or (key.covariance and held[slot].scatter is None):
            held[slot] = empty_state(key, site, weight)
        return held[slot]


class _Calibrating(Runtime):
    """Runs a graph in high precision with observers, and decides without recording it."""

    decides = _ForwardDecisions
    binds = _InputBinder

    def __call__(self, *args: Any) -> Any:
        out = super().__call__(*args)
        binding = self.binding_of(args)
        if binding is not None:
            binding.steps += 1
            self.probe.probed(binding.entries, self.probe.resumed + binding.steps)
        return out

    def decided(self) -> dict[str, SitePlan]:
        assert isinstance(self.decisions, _ForwardDecisions)
        for binding in [b for b in self.binder.last.values() if b.alive and b.steps]:
            observed = self.decisions.observed(binding, self.binder.positions)
            self.decisions.adopt(observed, self.decisions.propose(observed, None))
        return self.decisions.found


def _call(run: Callable[..., Any], batch: Batch) -> None:
    if isinstance(batch, Tensor):
        run(batch)
    elif isinstance(batch, Mapping):
        run(**batch)
    else:
        run(*batch)


@contextmanager
def _serving(model: nn.Module) -> Iterator[None]:
    """Eval mode, and no `module.compile()` in force; both as before afterwards."""
    before = [(m, m.training, m._compiled_call_impl) for m in model.modules()]
    try:
        for module, _, _ in before:
            module.training = False
            module._compiled_call_impl = None
        yield
    finally:
        for module, training, call in before:
            module.training, module._compiled_call_impl = training, call
