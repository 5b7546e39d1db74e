"""Parameters -> Binding: which variant of a graph they run, and the state that goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from loka_compile import _compat
from loka_compile import keeping
from loka_compile import mods
from loka_compile.binding import Args
from loka_compile.binding import Binding
from loka_compile.binding import identities
from loka_compile.binding import picker
from loka_compile.capture import Source
from loka_compile.decisions import Decisions
from loka_compile.decisions import shown_name
from loka_compile.fresh_state import empty_state
from loka_compile.fresh_state import forget_unpaired
from loka_compile.ledger import LEDGER
from loka_compile.lowering.weight_cache import Cache
from loka_compile.lowering.weight_cache import Stored
from loka_compile.mod_set import ModSet
from loka_compile.mod_set import by_mod
from loka_compile.mod_set import check_keep
from loka_compile.mod_set import pairs_of
from loka_compile.names import Site
from loka_compile.names import registered_layers
from loka_compile.names import registered_modules
from loka_compile.options import PROBE_STEPS
from loka_compile.options import Options
from loka_compile.passes.observe import StateKey
from loka_compile.peers import Peers
from loka_compile.plan import Choice
from loka_compile.plan import SitePlan
from loka_compile.probe.places import CELLS
from loka_compile.probe.places import Places
from loka_compile.probe.plain_steps import Cells
from loka_compile.probe.schedule import Schedule
from loka_compile.probe.session import Session
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.turns import Turns
from loka_compile.probing import Late
from loka_compile.step_meter import StepMeter
from loka_compile.telling import Teller
from loka_compile.variant import Decided
from loka_compile.variants import Built
from loka_compile.variants import Variants


class Binder:
    def __init__(
        self,
        source: Source,
        options: Options,
        decisions: Decisions,
        variants: Variants,
        peers: Peers,
        probe: Session,
        teller: Teller,
    ) -> None:
        self.source = source
        self.options = options
        self.decisions = decisions
        self.variants = variants
        self.peers = peers
        self.probe = probe
        self.teller = teller
        self.judged = [j.position for j in source.judged]
        #: Weights first, then what tells a fresh model from a trained one.
        self.positions = list(dict.fromkeys([*source.weights(), *self.judged]))
        #: Weights tell sets of parameters apart: host work per call is small, and models that share
        #: every weight share what is decided about them.
        self.ids = identities(source.weights() or self.positions)
        self._pick_judged = picker(self.judged)
        #: The last binding of each set of parameters, past memo clears.
        self.last: dict[tuple[int, ...], Binding] = {}

    def bind(self, args: Args, inputs: list[Any] | None = None) -> Binding:
        """`inputs`: see `Variants.get`."""
        source, options = self.source, self.options
        weights = self.weights(args)
        parameters = [args[i] for i in self.positions]
        entries = [LEDGER.entry(p) for p in parameters]
        judged = source.judge(args)
        layers = keeping.layers(source, weights)
        own, decision = self._decide(parameters, judged, layers)
        for entry in entries:
            entry.block, entry.heads = options.block, options.heads
            entry.blocks |= source.blocks
        # What has settled gives way to a backward alone: an evaluation decides for itself.
        mods.note((e for e in entries if not e.settled), decision.mods, decision.layers)
        site_plans = self.decisions.known(weights)
        kernels = self.decisions.kernels(site_plans)
        wanted = Decided(own, kernels, self.decisions.to_observe(site_plans))
        talk = self.peers.join(wanted.observed, weights, site_plans)
        built = self.variants.get(wanted, inputs)
        binding = Binding(self.ids(args), entries, decision, built)
        if built.states:
            binding.uses = [
                (LEDGER.entry(weights[s.name]), s.call)
                for s in source.sites
                if s.name in built.decided.observed
            ]
            last = self.last.get(binding.key)
            before = None if last is None else last.places
            binding.places = self._places(built, weights, before)
            binding.extra = binding.places.tensors
        if built.weights:
            binding.cache = self._stored(built, args)
            binding.extra = binding.cache.tensors
        if built.cells:
            binding.cells = self._cells(built, weights, binding.key)
            binding.extra = binding.cells.values.unbind(0)
        binding.site_plans = site_plans
        self._carry_on(binding)
        if decision.provisional and not binding.backward_ran:
            binding.stamp = mods.Stamp(self._pick_judged(args)) if self.judged else None
        if built.decided.observed or self.decisions.pinned:
            binding.talk = talk
        open_ = source.training and decision.sticks
        open_ &= not all(mods.settled(e, decision.mods, decision.layers) for e in entries)
        # What the options say sticks with the first backward, too.
        waits = open_ and not binding.backward_ran
        binding.watch = bool(built.states or binding.stamp or binding.talk or waits)
        scored = options.gate == "budget" and source.training and built.states
        if scored and binding.scorer is None:
            # Not at every start: it brings what measures errors.
            from loka_compile.scoring import Scorer

            binding.scorer = Scorer()
        if built.states and binding.meter is None and self._host_counts():
            binding.meter = StepMeter(source.device)
        if not binding.watch and site_plans:
            self._probe_late(binding)
        for site in source.sites:
            if site.weight:
                entry = LEDGER.entry(weights[site.name])
                entry.name = shown_name(site, weights[site.name]).partition("#")[0]
                entry.unfit.pop(site.call, None)
                if site.name in built.unfit:
                    entry.unfit[site.call] = built.unfit[site.name]
        for one in judged:
            LEDGER.entry(one.parameter).name = one.name
        first = entries[: len(source.weights())]
        refused = ""
        if kernels and not built.decided.kernels:
            refused = f"no variant with FP8 compiles here: {self.variants.why_refused(wanted)}"
        by_mods = keeping.wanted(layers, options)
        self.teller.bound(built, decision, site_plans, first, by_mods, refused)
        return binding

    @_compat.outside_modes()
    def _decide(
        self, parameters: list[Any], judged: list[mods.Judged], layers: keeping.Layers
    ) -> tuple[ModSet, mods.Decision]:
        """The Mods in force, by the graph's names of layers; and by those from the root, why."""
        options, plan = self.options, self.decisions.plan
        known = by_mod([(mod, name) for (mod, _), name in layers.items()])
        check_keep(options.keep, known, [*registered_layers(), *registered_modules()])
        planned = self.decisions.planned_mods()
        decision = mods.decide(options.mods, planned, parameters, judged)
        entries = [e for e in map(LEDGER.find, parameters) if e is not None]
        before = [e for e in entries if e.settled]
        follows = before if options.mods == "auto" else ()
        kept = keeping.kept(layers, options, None if planned is None else plan, follows)
        own = ModSet.of(decision.mods.names, kept)
        here = frozenset((mod, name) for (mod, _), name in layers.items())
        decision = replace(decision, mods=keeping.from_the_root(own, layers), layers=here)
        stuck = mods.decided_before(before)
        if planned is not None and plan is not None:
            theirs = here.intersection(pairs_of(plan.kept))
            self._say_other(decision, ModSet.of(planned, theirs), "the plan was made")
        if len(stuck) == 1:
            theirs = here.intersection(pair for e in before for pair in e.kept)
            self._say_other(decision, ModSet.of(stuck.pop(), theirs), "these parameters ran")
        return own, decision

    def _say_other(self, decision: mods.Decision, said: ModSet, who: str) -> None:
        told = mods.disagreement(decision, said, who)
        if told is not None:
            self.teller.say_once(told)

    def weights(self, args: Args) -> dict[str, Any]:
        return self.source.weights_of(args)

    def moved(self, stamp: mods.Stamp, args: Args) -> bool:
        return stamp.moved(self._pick_judged(args))

    def _carry_on(self, binding: Binding) -> None:
        """Probing goes on where the last binding of these parameters stood."""
        for entry in binding.entries:
            entry.holders.add(binding)
        last = self.last.get(binding.key)
        if last is not None and last.alive:
            binding.steps, binding.backward_ran = last.steps, last.backward_ran
            binding.pending, binding.outside = last.pending, last.outside
            binding.recomputed, binding.late = last.recomputed, last.late
            binding.scorer, binding.replayed_nats = last.scorer, last.replayed_nats
            binding.meter = last.meter
        self.last[binding.key] = binding

    def _host_counts(self) -> bool:
        """A plan is going to be made that weighs the host's time (`host_costs.py`)."""
        source = self.source
        return source.training and source.device.type == "cuda" and self.options.weighs_host

    def forget_dead(self) -> None:
        for key, binding in list(self.last.items()):
            if not binding.alive:
                del self.last[key]

    # -- probes after the plan --------------------------------------------------------------------

    def _probe_late(self, binding: Binding) -> None:
        """Arm the probes that come after the plan, or go on with those that ran before."""
        if not self.source.training or not self.decisions.eligible or not self.options.probe_every:
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
                late.built = late.places = late.turns = None

    def build_late(self, binding: Binding, late: Late, args: Args) -> None:
        """Compile the probed variant of the plan; without one there are no late probes."""
        watched = self._watched(binding.site_plans)
        wanted = replace(binding.built.decided, observed=watched)
        built = self.variants.get_exactly(wanted) if watched else None
        if built is None:
            binding.late = None
            return
        weights = self.weights(args)
        late.built = built
        late.places = self._places(built, weights)
        if self.options.probes_in_turn:
            late.turns = Turns(built.states, late.places)

    def _watched(self, plans: Mapping[str, SitePlan]) -> frozenset[str]:
        """Sites whose data may still matter: those with FP8 somewhere, and those that an error
        which was measured keeps out of it; not those that only time keeps in high precision.

        Those are often the ones with the most rows (a product per embedding), and to look at them
        would cost the most of a probed step. Plans choose by time first: what lost by it has no
        errors at all.
        """
        least = self.options.min_speedup

        def hangs_on_data(choice: Choice) -> bool:
            if choice.is_low:
                return True
            return choice.mere_clamped is not None and (
                choice.speedup is None or choice.speedup >= least
            )

        return frozenset(
            name
            for name in self.decisions.eligible
            if name not in plans or any(map(hangs_on_data, plans[name].directions.values()))
        )

    # -- state that is bound ----------------------------------------------------------------------

    @_compat.outside_modes()
    def _places(
        self, built: Built, weights: dict[str, Tensor], before: Places | None = None
    ) -> Places:
        """before: goes on where it can, for gradients may still come that look for it."""
        by_name = {s.name: s for s in self.source.sites}
        held = [self._state(key, by_name[key.site], weights[key.site]) for key in built.states]
        if before is not None and before.hold(held):
            return before
        made = Places(held, weights[built.states[0].site].device)
        cells = made.tensors[CELLS]
        if cells.is_cuda:
            built.cells_given.append(cells)
        return made

    def _state(self, key: StateKey, site: Site, weight: Tensor) -> Statistics:
        held, slot = LEDGER.entry(weight).statistics, (site.call, key.role)
        if slot not in held or (key.covariance and held[slot].scatter is None):
            held[slot] = empty_state(key, site, weight)
            self.probe.resume(shown_name(site, weight), key.role, held[slot])
            if key.role == "g":
                forget_unpaired(held[site.call, "x"], held[slot])
        return held[slot]

    @_compat.outside_modes()
    def _cells(self, built: Built, weights: dict[str, Tensor], key: tuple[int, ...]) -> Cells:
        """Those of these parameters in this graph; a new plan goes on with them where it can."""
        by_name = {s.name: s for s in self.source.sites}
        names = tuple(shown_name(by_name[name], weights[name]) for name in built.cells)
        last = self.last.get(key)
        if last is not None and last.alive and last.cells and last.cells.sites == names:
            return last.cells
        return Cells.of(names, weights[built.cells[0]].device)

    @_compat.outside_modes()
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
