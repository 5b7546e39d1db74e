"""The callable that the backend returns: picks the variant for these parameters, and swaps plans.

Life of a training graph: the first variant observes its sites while it runs in high precision; at
the start of the step after the early probes the sites are quantified, a plan is made, and the next
variant is compiled and swapped in. Forward and backward always come from one variant, so a swap is
safe at any moment. Other graphs of the same parameters (eval, dynamic batch, shared blocks) look
the decisions up.
"""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile import mods
from loka_compile import planner
from loka_compile import variant
from loka_compile.capture import Source
from loka_compile.ledger import LEDGER
from loka_compile.ledger import Entry
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.select import check_patterns
from loka_compile.names import Site
from loka_compile.names import layer_path
from loka_compile.names import registered_name
from loka_compile.options import PROBE_STEPS
from loka_compile.options import Environment
from loka_compile.options import Options
from loka_compile.passes.dispatch import Kernels
from loka_compile.plan import Plan
from loka_compile.plan import SitePlan
from loka_compile.probe.statistics import Statistics
from loka_compile.report import collect
from loka_compile.variant import Decided

log = logging.getLogger("loka_compile")


@dataclass
class Binding:
    """One set of parameters that runs through this graph."""

    key: tuple[int, ...]
    entries: list[Entry]
    decision: mods.Decision
    decided: Decided
    fn: Callable[..., Any]
    #: Probe state behind the graph's own inputs.
    extra: tuple[Tensor, ...] = ()
    #: True while something is to be looked at around each call.
    watch: bool = False
    steps: int = 0
    backward_ran: bool = False
    fingerprint: tuple[tuple[int, int], ...] = ()
    site_plans: dict[str, SitePlan] = field(default_factory=dict)


class Runtime:
    def __init__(
        self, source: Source, options: Options, plan: Plan | None, environment: Environment
    ) -> None:
        self.source = source
        self.options = options
        self.plan = plan
        self.sites = source.sites
        check_patterns([s.name for s in self.sites], options)
        self.eligible = planner.eligible(self.sites, source.device, options)
        self.report = collect.GraphReport(
            label=source.label(), prepared=list(source.records), environment=environment
        )
        self._ids = _picker([*source.weights(), *(j.position for j in source.judged)])
        self._memo: dict[tuple[int, ...], Binding] = {}
        self._version = LEDGER.version
        self._variants: dict[Decided, tuple[Callable[..., Any], variant.Rewritten]] = {}
        self._agreed: dict[str, Kernels] = {}
        #: (step count, backward seen) of bindings whose memo entry was dropped.
        self._progress: dict[tuple[int, ...], tuple[int, bool]] = {}
        self._said: set[str] = set()
        self._lock = threading.RLock()

    # -- calls ------------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        if self._version != LEDGER.version:
            self._memo.clear()
            self._version = LEDGER.version
        binding = self._memo.get(self._ids(args))
        if binding is None:
            binding = self._bind(args)
        if not binding.watch:
            return binding.fn(*args, *binding.extra)
        return self._watched(binding, args)

    def prepare(self, example_inputs: list[Any]) -> None:
        """Compile the first variant inside Dynamo's own compile, where its guards still count."""
        if any(not isinstance(example_inputs[i], Tensor) for i in self.source.weights()):
            return
        self._bind(tuple(example_inputs), inputs=example_inputs)

    def _watched(self, binding: Binding, args: tuple[Any, ...]) -> Any:
        if binding.decision.provisional and not binding.backward_ran:
            now = mods.fingerprint(self.source.judge(args))
            if now != binding.fingerprint:
                # A checkpoint was loaded after the first call: look again.
                binding = self._bind(args)
        if self._ready(binding):
            self._make_plan(args)
            binding = self._memo.get(self._ids(args)) or self._bind(args)
        out = binding.fn(*args, *binding.extra)
        if binding.watch:
            self._after(binding, out)
        return out

    def _ready(self, binding: Binding) -> bool:
        return (
            bool(binding.decided.observed)
            and binding.steps >= PROBE_STEPS
            and binding.backward_ran
        )

    def _after(self, binding: Binding, out: Any) -> None:
        if not self.source.training:
            return
        binding.steps += 1
        if not binding.backward_ran:
            for tensor in out if isinstance(out, (list, tuple)) else (out,):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: self._backward_ran(binding))
                    break
        self._progress[binding.key] = (binding.steps, binding.backward_ran)

    def _backward_ran(self, binding: Binding) -> None:
        if binding.backward_ran:
            return
        binding.backward_ran = True
        self._progress[binding.key] = (binding.steps, True)
        if binding.decision.provisional:
            mods.settle(binding.entries, binding.decision.on)

    # -- decisions --------------------------------------------------------------------------------

    def _bind(self, args: tuple[Any, ...], inputs: list[Any] | None = None) -> Binding:
        with self._lock:
            collect.seen(self.report)
            key = self._ids(args)
            weights = {s.name: args[self.source.positions[s.weight]] for s in self.sites if s.weight}
            entries = [LEDGER.entry(args[i]) for i in self._positions()]
            judged = self.source.judge(args)
            decision = mods.decide(
                self.options.mods, self._planned_mods(), [args[i] for i in self._positions()], judged
            )
            for entry in entries:
                entry.block = self.options.block
                if not entry.settled or self.options.mods != "auto":
                    entry.mods = decision.on
            site_plans = self._known_plans(weights)
            kernels = self._kernels(site_plans)
            observed = self._to_observe(site_plans)
            decided = Decided(decision.on, kernels, observed)
            fn, rewritten, decided = self._variant(decided, inputs)
            extra = self._states(rewritten, weights)
            steps, ran = self._progress.get(key, (0, False))
            binding = Binding(
                key, entries, decision, decided, fn, extra, steps=steps, backward_ran=ran
            )
            binding.fingerprint = mods.fingerprint(judged) if decision.provisional else ()
            binding.site_plans = site_plans
            binding.watch = bool(decided.observed) or (decision.provisional and not ran)
            self._memo[key] = binding
            self._version = LEDGER.version
            self._name(weights, entries, judged)
            self._tell(binding, rewritten)
            return binding

    def _positions(self) -> list[int]:
        judged = (j.position for j in self.source.judged)
        return list(dict.fromkeys([*self.source.weights(), *judged]))

    def _planned_mods(self) -> bool | None:
        if self.plan is None:
            return None
        named = any(s.name in self.plan.sites for s in self.sites) or any(
            j.name in self.plan.parameters for j in self.source.judged
        )
        return self.plan.mods if named else None

    def _shown_name(self, site: Site, weight: Tensor | None) -> str:
        """The site's name for these parameters: equal blocks share a graph, not a name."""
        registered = registered_name(weight) if weight is not None else None
        if registered is None:
            return site.name
        return layer_path(registered) + (f"#{site.call}" if site.call else "")

    def _known_plans(self, weights: dict[str, Tensor]) -> dict[str, SitePlan]:
        """Decisions that are in force: of the given plan by name and shape, else by identity."""
        found: dict[str, SitePlan] = {}
        for site in self.sites:
            weight = weights.get(site.name)
            if self.plan is not None:
                name = self._shown_name(site, weight)
                one = self.plan.find(name, site.k, site.n)
                if one is None and name in self.plan.sites:
                    old = self.plan.sites[name]
                    self._say_once(
                        f"the plan decided {name} for K={old.K}, N={old.N}, here it is "
                        f"K={site.k}, N={site.n}: it runs in high precision"
                    )
            else:
                entry = LEDGER.find(weight) if weight is not None else None
                one = entry.sites.get(site.call) if entry is not None else None
            if one is not None:
                found[site.name] = one
                if weight is not None:
                    LEDGER.entry(weight).sites[site.call] = one
        return found

    def _kernels(self, site_plans: dict[str, SitePlan]) -> tuple[tuple[str, Kernels], ...]:
        chosen = []
        for site in self.sites:
            one = site_plans.get(site.name)
            if one is None or site.name not in self.eligible:
                continue
            runnable = tuple(
                planner.runnable(kernel, self.source.device, self.options) for kernel in one.kernels
            )
            agreed = self._agreed.setdefault(site.name, runnable)  # type: ignore[arg-type]
            if agreed != runnable:
                # Layers that share this graph differ: high precision where any of them needs it.
                agreed = tuple(
                    a if a == b else HIGH_PRECISION for a, b in zip(agreed, runnable, strict=True)
                )  # type: ignore[assignment]
                self._agreed[site.name] = agreed
                self.report.note(
                    f"{site.name}: layers that share this graph chose different kernels; "
                    "directions that differ run in high precision"
                )
            if any(kernel != HIGH_PRECISION for kernel in agreed):
                chosen.append((site.name, agreed))
        return tuple(chosen)

    def _to_observe(self, site_plans: dict[str, SitePlan]) -> frozenset[str]:
        if not self.source.training or self.plan is not None:
            return frozenset()
        undecided = [n for n in self.eligible if n not in site_plans]
        return frozenset(undecided)

    def _variant(
        self, decided: Decided, inputs: list[Any] | None
    ) -> tuple[Callable[..., Any], variant.Rewritten, Decided]:
        held = self._variants.get(decided)
        if held is not None:
            return (*held, decided)
        try:
            fn, rewritten = variant.build(self.source, decided, self.options, inputs=inputs)
        except _compat.dynamo_control_flow():
            raise
        except Exception as error:
            return self._without(decided, inputs, error)
        # At most two variants live: the probed one, and the one in force.
        for old in [d for d in self._variants if d.mods == decided.mods and inputs is None]:
            del self._variants[old]
        self._variants[decided] = (fn, rewritten)
        return fn, rewritten, decided

    def _without(
        self, decided: Decided, inputs: list[Any] | None, error: Exception
    ) -> tuple[Callable[..., Any], variant.Rewritten, Decided]:
        """A variant that does not compile is replaced by a plainer one, and the report says why."""
        self._say_once(f"variant ({decided.label()}) refused: {type(error).__name__}: {error}")
        log.debug("variant refused", exc_info=error)
        if inputs is None:
            for old, held in self._variants.items():
                if old.mods == decided.mods:
                    return (*held, old)
        if decided.observed:
            return self._variant(Decided(decided.mods, decided.kernels), inputs)
        if decided.kernels:
            return self._variant(Decided(decided.mods), inputs)
        raise error

    def _states(
        self, rewritten: variant.Rewritten, weights: dict[str, Tensor]
    ) -> tuple[Tensor, ...]:
        by_name = {s.name: s for s in self.sites}
        tensors: list[Tensor] = []
        for key in rewritten.states:
            site = by_name[key.site]
            entry = LEDGER.entry(weights[key.site])
            features = site.k if key.role == "x" else site.n
            state = entry.statistics.get((site.call, key.role))
            if state is None:
                state = Statistics.empty(features, site.dtype, weights[key.site].device)
                entry.statistics[(site.call, key.role)] = state
            tensors.extend(state.tensors)
        return tuple(tensors)

    def _make_plan(self, args: tuple[Any, ...]) -> None:
        """Quantify every observed site of every set of parameters seen, and decide."""
        with self._lock:
            fused = self._fused_now()
            for binding in list(self._memo.values()):
                if not binding.decided.observed:
                    continue
                weights = dict(zip(self._positions(), binding.entries, strict=True))
                for site in self.sites:
                    if site.name not in binding.decided.observed:
                        continue
                    entry = weights[self.source.positions[site.weight]]
                    weight = entry.ref()
                    if weight is None:
                        continue
                    entry.sites[site.call] = planner.decide_site(
                        replace(site, name=self._shown_name(site, weight)), weight, entry.statistics, fused.get(site.name), self.options
                    )
                    entry.emulated = self.options.emulate
            self.report.note(f"plan made after {PROBE_STEPS} probed steps")
            LEDGER.touch()
            self._memo.clear()
            self._agreed.clear()

    def _fused_now(self) -> dict[str, str]:
        for _, rewritten in self._variants.values():
            return rewritten.fused
        return {}

    # -- what the user is told --------------------------------------------------------------------

    def _name(self, weights: dict[str, Tensor], entries: list[Entry], judged: Any) -> None:
        for site in self.sites:
            if site.weight:
                weight = weights[site.name]
                LEDGER.entry(weight).name = self._shown_name(site, weight).partition("#")[0]
        for one in judged:
            LEDGER.entry(one.parameter).name = one.name

    def _tell(self, binding: Binding, rewritten: variant.Rewritten) -> None:
        self.report.update(
            planner.table(self.sites, binding.site_plans, rewritten.fused, self.eligible,
                          self.source.device, self.options, self.source.training),
            rewritten.records,
            binding.decided.label(),
            binding.decision,
            lambda decided=binding.decided: variant.rewrite(
                self.source, decided, self.options, keep_text=True
            ).records,
        )
        if binding.decision.on:
            counts = self.report.change_counts()
            if counts and "on" not in self._said:
                self._said.add("on")
                collect.say_once(
                    ("on", binding.key), mods.say_changes, self.source.label(), counts,
                    binding.decision,
                )
        elif self.options.mods == "auto" and not binding.decision.quiet and "off" not in self._said:
            self._said.add("off")
            counts = planner.left_alone(self.source, self.options)
            collect.say_once(
                ("off", binding.key), mods.say_left_alone, self.source.label(), counts,
                binding.decision,
            )

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self.report.note(what)
            log.warning("loka: %s: %s", self.source.label(), what)


def _picker(positions: list[int]) -> Callable[[tuple[Any, ...]], tuple[int, ...]]:
    """args -> ids of the parameters, for the memo. itemgetter of one position is a scalar."""
    positions = list(dict.fromkeys(positions))
    if not positions:
        return lambda args: ()
    if len(positions) == 1:
        only = positions[0]
        return lambda args: (id(args[only]),)
    pick = operator.itemgetter(*positions)
    return lambda args: tuple(map(id, pick(args)))

