"""The callable that the backend returns: picks the variant for these parameters, and swaps plans.

Life of a training graph: the first variant observes its sites while it runs in high precision; at
the start of the step after the early probes the sites are quantified, a plan is made, and the next
variant is compiled and swapped in. Forward and backward always come from one variant, so a swap is
safe between steps; it waits while a forward's backward may still come, for a checkpoint around us
runs that forward again. With the plan in force, one step in `probe_every` runs a variant of it that
observes (`probing.py`). Other graphs of the same parameters (eval, dynamic batch, shared blocks)
look the decisions up.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from loka_compile import _compat
from loka_compile import demotion
from loka_compile import mods
from loka_compile import planner
from loka_compile import replay
from loka_compile.capture import Source
from loka_compile.ledger import LEDGER
from loka_compile.ledger import Entry
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.select import check_patterns
from loka_compile.lowering.weight_cache import Cache
from loka_compile.lowering.weight_cache import Stored
from loka_compile.names import Site
from loka_compile.names import layer_path
from loka_compile.names import registered_layers
from loka_compile.names import registered_name
from loka_compile.options import PROBE_STEPS
from loka_compile.options import Environment
from loka_compile.options import Options
from loka_compile.passes.dispatch import Kernels
from loka_compile.plan import Plan
from loka_compile.plan import SitePlan
from loka_compile.probe.schedule import Schedule
from loka_compile.probe.session import Session
from loka_compile.probe.session import say_memory
from loka_compile.probe.session import session
from loka_compile.probe.statistics import CANDIDATES
from loka_compile.probe.statistics import Statistics
from loka_compile.probing import Late
from loka_compile.scoring import Scorer
from loka_compile.telling import Teller
from loka_compile.variant import Decided
from loka_compile.variants import Built
from loka_compile.variants import Variants

Args = tuple[Any, ...]


class Pending:
    """Stands for one forward; lives as long as its autograd graph."""


@dataclass(eq=False)
class Binding:
    """One set of parameters that runs through this graph."""

    key: tuple[int, ...]
    entries: list[Entry]
    decision: mods.Decision
    built: Built
    #: Probe state behind the graph's own inputs.
    extra: tuple[Tensor, ...] = ()
    #: Quantised weights behind them, in an inference graph.
    cache: Cache | None = None
    #: True while something is to be looked at around each call.
    watch: bool = False
    #: Forwards whose backward may still come.
    pending: weakref.WeakSet[Pending] = field(default_factory=weakref.WeakSet)
    #: False once one of the parameters is gone.
    alive: bool = True
    steps: int = 0
    #: Has been called outside a backward. A reentrant checkpoint's graph never is.
    outside: bool = False
    backward_ran: bool = False
    stamp: tuple[int, ...] = ()
    site_plans: dict[str, SitePlan] = field(default_factory=dict)
    #: A checkpoint around the graph has run its forward again.
    recomputed: bool = False
    #: Probing once the plan is in force.
    late: Late | None = None
    #: gate="budget": what predicts the loss of kernels, while this is probed.
    scorer: Scorer | None = None

    @property
    def ready(self) -> bool:
        """The early probes are done, forward and backward, and no plan has been made of them."""
        if not self.backward_ran or self.steps < PROBE_STEPS or self.pending:
            # A checkpoint around us compares what its forward and its recomputation save, so no
            # swap may come between the two.
            return False
        return not self.built.decided.observed <= self.site_plans.keys()

    def release(self) -> None:
        self.alive = False
        self.entries, self.extra, self.cache, self.late = [], (), None, None
        self.scorer = None


class Runtime:
    #: What a plan made here decides.
    directions: Sequence[str] = DIRECTIONS

    def __init__(
        self, source: Source, options: Options, plan: Plan | None, environment: Environment
    ) -> None:
        self.source = source
        self.options = options
        self.plan = plan
        self.sites = source.sites
        check_patterns([*(s.name for s in self.sites), *registered_layers()], options)
        self.eligible = planner.eligible(self.sites, source.device, options)
        self.probe: Session = session(
            options.probe_dir,
            rows_on_disk=options.probe_rows_on_disk,
            weight_model=options.probe_weight_model,
        )
        self.teller = Teller(source, options, environment, self.eligible)
        self.variants = Variants(source, options, self.teller.say_once)
        judged = [j.position for j in source.judged]
        #: Weights first, then what tells a fresh model from a trained one.
        self._positions = list(dict.fromkeys([*source.weights(), *judged]))
        self._ids = _picker(self._positions)
        self._judged = judged
        self._memo: dict[tuple[int, ...], Binding] = {}
        self._version = LEDGER.version
        #: The last binding of each set of parameters, past memo clears.
        self._last: dict[tuple[int, ...], Binding] = {}
        #: What Dynamo's own compile bound.
        self._prepared: Callable[[], Binding | None] = lambda: None
        self._agreed: dict[str, Kernels] = {}
        self._lock = threading.RLock()

    # -- calls ------------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        if self._version != LEDGER.version:
            self._forget()
        binding = self._memo.get(self._ids(args))
        if binding is None:
            prepared = self._prepared()
            if prepared is not None and any(map(_compat.is_fake, args)):
                # DDPOptimizer asks with fakes for the strides of the results.
                return prepared.built.fn(*args, *prepared.extra)
            binding = self._bind(args)
        if binding.cache is not None:
            binding.cache.refresh(args)
        if binding.watch:
            return self._watched(binding, args)
        late = binding.late
        if late is not None:
            late.left -= 1
            if late.left <= 0 or late.careful:
                return self._late(binding, late, args)
        return self._run(binding, args, binding.extra)

    def _run(self, binding: Binding, args: Args, states: tuple[Tensor, ...]) -> Any:
        try:
            return binding.built.fn(*args, *states)
        except Exception as error:
            if binding.built.decided.kernels and demotion.may_be_a_kernel(error):
                return self._in_high_precision(binding, args, error)
            raise

    def _in_high_precision(self, binding: Binding, args: Args, error: Exception) -> Any:
        """Run a failed forward again without FP8; where that works, the FP8 kernels were to blame.

        What fails inside a backward is out of reach here: it ends in autograd's own frame.
        """
        with self._lock:
            high = self.variants.get(Decided(binding.built.decided.mods), None)
        try:
            out = high.fn(*args)
        except Exception:
            raise error from None
        with self._lock:
            fp8 = dict(binding.built.decided.kernels)
            plans = [p for name, p in binding.site_plans.items() if name in fp8]
            names = demotion.demote(plans, "fwd", error)
            self.teller.say_once(
                f"a forward kernel failed ({type(error).__name__}: {error}); this step ran again "
                f"in high precision, and so will these sites: {', '.join(names)}"
            )
            self._agreed.clear()
            LEDGER.touch()
        return out

    def prepare(self, real: list[Any], inputs: list[Any]) -> None:
        """Compile the first variant inside Dynamo's own compile, where its guards still count.

        real: the inputs, `inputs`: what the inner compiler is given, which may be fakes of them.
        """
        if all(isinstance(real[i], Tensor) for i in self.source.weights()):
            self._prepared = weakref.ref(self._bind(tuple(real), inputs=inputs))

    def _watched(self, binding: Binding, args: Args) -> Any:
        recomputed = _compat.in_backward() and binding.outside
        # Before the call: a recomputation may be left by an exception once it has saved enough.
        binding.recomputed |= recomputed
        if not recomputed:
            binding = self._renewed(binding, args)
            if not binding.watch:
                # The plan came into force: this step is the first under it.
                return self(*args)
        # Aliases with version counters of their own: between this forward and its backward other
        # calls may write to the state, which autograd would refuse.
        states = tuple(t.data for t in binding.extra)
        out = self._run(binding, args, states)
        if binding.scorer is not None and binding.built.states and not recomputed:
            self._score(binding.scorer, binding.steps, args, out, states)
        if self.source.training and binding.watch:
            binding.steps += not recomputed
            if binding.built.states and not recomputed:
                self.probe.probed(binding.entries, self.probe.resumed + binding.steps)
            pending = Pending()
            if not recomputed:
                binding.pending.add(pending)
                binding.outside |= not _compat.in_backward()

            def before_backward() -> None:
                binding.pending.discard(pending)
                self._backward_ran(binding)
                _compat.set_versions_to_zero(states)

            _on_backward(out, before_backward)
        return out

    def _score(
        self, scorer: Scorer, steps: int, args: Args, out: Any, states: tuple[Tensor, ...]
    ) -> None:
        """gate="budget": one backward more, where the Scorer wants one."""
        weights = self._weights(args)
        statistics = {
            s.name: LEDGER.entry(weights[s.name]).statistics.get((s.call, "g"))
            for s in self.sites
            if s.weight
        }
        towards = list({id(w): w for w in weights.values() if w.requires_grad}.values())
        held = {name: one for name, one in statistics.items() if one is not None}
        scorer.saw(out, steps, towards, held, states)

    def _late(self, binding: Binding, late: Late, args: Args) -> Any:
        """A probed step, or a plain one of a graph that may be run again in the backward."""
        again = _compat.in_backward()
        if again:
            # Not a step; and of the variant that the forward had.
            late.left += 1
            late.recomputed = binding.recomputed = True
        elif not late.pending:
            late.active = late.left <= 0
        late.saw_call(again)
        step = 0
        if late.active and not again:
            if late.built is None:
                self._build_late(binding, late, args)
            step = late.took_place()
        late.active = late.active and late.built is not None
        built, extra = binding.built, binding.extra
        if late.active and late.built is not None:
            built, extra = late.built, late.extra
        states = tuple(t.data for t in extra)
        out = built.fn(*args, *states)
        if late.active or late.careful:
            pending = Pending()
            if late.careful and not again:
                late.pending.add(pending)

            def before_backward() -> None:
                late.pending.discard(pending)
                _compat.set_versions_to_zero(states)

            _on_backward(out, before_backward)
        if step and late.active:
            self.probe.probed(binding.entries, step)
        if not late.careful:
            late.active = False
        return out

    def _build_late(self, binding: Binding, late: Late, args: Args) -> None:
        """Compile the probed variant of the plan; without one there are no late probes."""
        decided = binding.built.decided
        wanted = replace(decided, observed=self.eligible)
        built = self.variants.get_exactly(wanted)
        if built is None:
            binding.late = None
            return
        late.built = built
        late.extra = self._states(built, self._weights(args))

    def _weights(self, args: Args) -> dict[str, Any]:
        return {s.name: args[self.source.positions[s.weight]] for s in self.sites if s.weight}

    def _renewed(self, binding: Binding, args: Args) -> Binding:
        if binding.stamp and not binding.backward_ran and binding.stamp != self._stamp(args):
            # A checkpoint was loaded after the first call: look again.
            binding = self._bind(args)
        if binding.ready:
            self._make_plan(args)
            binding = self._bind(args)
        return binding

    def _forget(self) -> None:
        with self._lock:
            self._version = LEDGER.version
            self._memo.clear()
            for key, binding in list(self._last.items()):
                if not binding.alive:
                    del self._last[key]

    def _backward_ran(self, binding: Binding) -> None:
        if binding.backward_ran:
            return
        binding.backward_ran = True
        if binding.decision.provisional:
            mods.settle(binding.entries, binding.decision.on)

    def _stamp(self, args: Args) -> tuple[int, ...]:
        """Moves when a judged parameter is written or gets new storage."""
        return mods.fingerprint([args[i] for i in self._judged])

    # -- decisions --------------------------------------------------------------------------------

    def _bind(self, args: Args, inputs: list[Any] | None = None) -> Binding:
        with self._lock:
            weights = self._weights(args)
            parameters = [args[i] for i in self._positions]
            entries = [LEDGER.entry(p) for p in parameters]
            judged = self.source.judge(args)
            decision = mods.decide(self.options.mods, self._planned_mods(), parameters, judged)
            for entry in entries:
                entry.block, entry.heads = self.options.block, self.options.heads
                if not entry.settled or self.options.mods != "auto":
                    entry.mods = decision.on
            site_plans = self._known_plans(weights)
            wanted = Decided(decision.on, self._kernels(site_plans), self._to_observe(site_plans))
            built = self.variants.get(wanted, inputs)
            binding = Binding(self._ids(args), entries, decision, built)
            binding.extra = self._states(built, weights)
            if built.weights:
                binding.cache = self._stored(built, args)
                binding.extra = binding.cache.tensors
            binding.site_plans = site_plans
            self._carry_on(binding)
            if decision.provisional and not binding.backward_ran:
                binding.stamp = self._stamp(args)
            binding.watch = bool(built.states) or bool(binding.stamp)
            scored = self.options.gate == "budget" and self.source.training and built.states
            if scored and binding.scorer is None:
                binding.scorer = Scorer()
            if not binding.watch and site_plans:
                self._probe_late(binding)
            self._memo[binding.key] = binding
            self._version = LEDGER.version
            for site in self.sites:
                if site.weight:
                    entry = LEDGER.entry(weights[site.name])
                    entry.name = self._shown_name(site, weights[site.name]).partition("#")[0]
            for one in judged:
                LEDGER.entry(one.parameter).name = one.name
            weighty = entries[: len(self.source.weights())]
            self.teller.bound(built, decision, site_plans, weighty)
            return binding

    def _carry_on(self, binding: Binding) -> None:
        """Probing goes on where the last binding of these parameters stood."""
        for entry in binding.entries:
            entry.holders.add(binding)
        last = self._last.get(binding.key)
        if last is not None and last.alive:
            binding.steps, binding.backward_ran = last.steps, last.backward_ran
            binding.pending, binding.outside = last.pending, last.outside
            binding.recomputed, binding.late = last.recomputed, last.late
            binding.scorer = last.scorer
        self._last[binding.key] = binding

    def _probe_late(self, binding: Binding) -> None:
        """Arm the probes that come after the plan, or go on with those that ran before."""
        if not self.source.training or not self.eligible or not self.options.probe_every:
            return
        if binding.late is None:
            step = self.probe.resumed + binding.steps
            binding.late = Late.starting(Schedule(self.options.probe_every), step)
            if binding.late is not None and binding.steps >= PROBE_STEPS:
                # The early steps have shown whether a checkpoint runs this graph again.
                binding.late.careful = binding.late.recomputed = binding.recomputed
            return
        late = binding.late
        if late.built is not None:
            plain = replace(late.built.decided, observed=frozenset())
            if plain != binding.built.decided:
                late.built, late.extra = None, ()

    def _planned_mods(self) -> bool | None:
        if self.plan is None:
            return None
        named = any(s.name in self.plan.sites for s in self.sites) or any(
            j.name in self.plan.parameters for j in self.source.judged
        )
        if not named and self.plan.active:
            self.teller.say_once("the plan names none of this graph's sites; it is not applied")
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
            if weight is None:
                continue
            entry = LEDGER.entry(weight)
            if self.plan is None or not self.plan.active:
                one = entry.sites.get(site.call)
            else:
                one = self._of_plan(self.plan, site, self._shown_name(site, weight))
            if one is None:
                shown = replace(site, name=self._shown_name(site, weight))
                one = planner.forced_plan(shown, self.options)
            if one is not None:
                found[site.name] = entry.sites[site.call] = demotion.apply(one)
        return found

    def _of_plan(self, plan: Plan, site: Site, name: str) -> SitePlan | None:
        one = plan.find(name, site.k, site.n)
        if one is None and name in plan.sites:
            old = plan.sites[name]
            self.teller.say_once(
                f"the plan decided {name} for K={old.K}, N={old.N}; here it is K={site.k}, "
                f"N={site.n}, so it runs in high precision"
            )
        return one

    def _kernels(self, site_plans: dict[str, SitePlan]) -> tuple[tuple[str, Kernels], ...]:
        chosen = []
        for site in self.sites:
            one = site_plans.get(site.name)
            if one is None or site.name not in self.eligible:
                continue
            fwd, dgrad, wgrad = (
                planner.runnable(kernel, self.source.device, self.options) for kernel in one.kernels
            )
            own: Kernels = (fwd, dgrad, wgrad)
            agreed = self._agreed.setdefault(site.name, own)
            if agreed != own:
                agreed = self._agree(site.name, agreed, own)
            if any(kernel != HIGH_PRECISION for kernel in agreed):
                chosen.append((site.name, agreed))
        return tuple(chosen)

    def _agree(self, name: str, a: Kernels, b: Kernels) -> Kernels:
        """Layers that share this graph differ: high precision where any of them needs it."""
        fwd, dgrad, wgrad = (
            one if one == other else HIGH_PRECISION for one, other in zip(a, b, strict=True)
        )
        self._agreed[name] = (fwd, dgrad, wgrad)
        self.teller.report.note(
            f"{name}: layers that share this graph chose different kernels; directions that "
            "differ run in high precision"
        )
        return self._agreed[name]

    def _to_observe(self, site_plans: dict[str, SitePlan]) -> frozenset[str]:
        pinned = self.plan is not None and self.plan.active
        if not self.source.training or pinned:
            return frozenset()
        return frozenset(n for n in self.eligible if n not in site_plans)

    def _states(self, built: Built, weights: dict[str, Tensor]) -> tuple[Tensor, ...]:
        by_name = {s.name: s for s in self.sites}
        tensors: list[Tensor] = []
        for key in built.states:
            site, weight = by_name[key.site], weights[key.site]
            held = LEDGER.entry(weight).statistics
            features = site.k if key.role == "x" else site.n
            slot = (site.call, key.role)
            if slot not in held or (key.covariance and held[slot].scatter is None):
                held[slot] = Statistics.empty(
                    features,
                    site.dtype,
                    weight.device,
                    gradient=key.role == "g",
                    covariance=key.covariance,
                )
                shown = self._shown_name(site, weight)
                self.probe.resume(shown, key.role, held[slot])
                if key.role == "g":
                    _forget_unpaired(held[site.call, "x"], held[slot])
            tensors.extend(key.tensors(held[slot]))
        return tuple(tensors)

    def _stored(self, built: Built, args: Args) -> Cache:
        """Quantised weights of this binding; equal ones are shared between graphs and calls."""
        stored, positions = [], []
        for key in built.weights:
            position = self.source.positions[key.placeholder]
            held = LEDGER.entry(args[position]).stored
            slot = (key.kernel, key.dtype, key.transposed)
            if slot not in held:
                held[slot] = Stored.of(args[position], *slot)
            stored.append(held[slot])
            positions.append(position)
        return Cache(stored, positions, frozen=self.options.weight_cache == "frozen")

    def _make_plan(self, args: Args) -> None:
        """Quantify every observed site of every set of parameters that was probed, and decide.

        args: of the step that is about to run, whose rows no probe has seen.
        """
        with self._lock:
            for binding in list(self._last.values()):
                if binding.alive and binding.steps and binding.backward_ran:
                    self._decide(binding, args if binding.key == self._ids(args) else None)
            self.teller.report.note(f"plan made after {PROBE_STEPS} probed steps")
            held = [binding.entries for binding in self._last.values()]
            self.teller.report.note(say_memory(entry for one in held for entry in one))
            self._agreed.clear()
            self._memo.clear()
            LEDGER.touch()

    def _decide(self, binding: Binding, args: Args | None) -> None:
        """Decide for the observed sites of one set of parameters, all at once."""
        held = dict(zip(self._positions, binding.entries, strict=True))
        built = binding.built
        chains = dict(built.chains)
        shown: dict[str, str] = {}
        probed: list[planner.Probed] = []
        entries: dict[str, tuple[Entry, int]] = {}
        for site in self.sites:
            entry = held[self.source.positions[site.weight]] if site.weight else None
            weight = entry.ref() if entry is not None else None
            if site.name not in built.decided.observed or entry is None or weight is None:
                continue
            name = shown[site.name] = self._shown_name(site, weight)
            fused = built.fused.get(site.name)
            one = replace(site, name=name)
            if (site.call, "x") not in entry.statistics:
                self._record(
                    entry, site.call, planner.stay_high(one, fused, "replaced by a pattern"), None
                )
                continue
            chain = chains.get(site.name)
            epilogue, producer = (chain.epilogue, chain.producer) if chain else ("", None)
            probed.append(
                planner.Probed(
                    one, weight, entry.statistics, fused, epilogue, shown.get(producer or ""),
                    None if binding.scorer is None else partial(binding.scorer.nats, site.name),
                    self.directions,
                )
            )  # fmt: skip
            entries[name] = entry, site.call

        def failed(name: str, why: str) -> None:
            self.teller.say_once(f"{name} {why}")

        def replayed(plans: Mapping[str, SitePlan]) -> float | None:
            scorer = binding.scorer
            if scorer is None or args is None:
                return None
            back = {s: plans[n] for s, n in shown.items() if n in plans}
            return replay.replay(
                self.source, self.options, binding.decision.on, back, args, scorer.kinds
            )

        decided, nats = planner.decide(probed, self.options, failed, replayed)
        for name, plan in decided.items():
            self._record(*entries[name], plan, nats)
        if binding.scorer is not None:
            self.teller.report.note(replay.sentence(decided, nats, self.options.loss_budget))
            # The rows it holds are of no more use.
            binding.scorer = None

    def _record(self, entry: Entry, call: int, plan: SitePlan, nats: float | None) -> None:
        entry.sites[call] = plan
        entry.emulated = self.options.emulate
        entry.replayed_nats = nats


def _forget_unpaired(x: Statistics, gradient: Statistics) -> None:
    """What a calibration recorded of an input has no gradient to its rows: wgrad needs pairs."""
    if float(x.scalars[CANDIDATES]) != float(gradient.scalars[CANDIDATES]):
        for tensor in x.tensors:
            tensor.zero_()


def _on_backward(out: Any, call: Callable[[], None]) -> None:
    """`call` before a gradient that reached one of the outputs goes through the graph."""
    for tensor in out if isinstance(out, (list, tuple)) else (out,):
        if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
            tensor.register_hook(lambda _: call())


def _picker(positions: list[int]) -> Callable[[Args], tuple[int, ...]]:
    """args -> ids of the parameters, for the memo. itemgetter of one position is a scalar."""
    if not positions:
        return lambda args: ()
    if len(positions) == 1:
        only = positions[0]
        return lambda args: (id(args[only]),)
    pick = operator.itemgetter(*positions)
    return lambda args: tuple(map(id, pick(args)))
