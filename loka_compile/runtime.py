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

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile import demotion
from loka_compile import eligibility
from loka_compile import mods
from loka_compile.backward_hook import on_backward
from loka_compile.binder import Binder
from loka_compile.binding import Args
from loka_compile.binding import Binding
from loka_compile.capture import Source
from loka_compile.decisions import Decisions
from loka_compile.failure_board import PENDING
from loka_compile.kernels import captured
from loka_compile.ledger import LEDGER
from loka_compile.lowering.select import check_patterns
from loka_compile.names import registered_layers
from loka_compile.options import PROBE_STEPS
from loka_compile.options import Environment
from loka_compile.options import Options
from loka_compile.peers import Peers
from loka_compile.plan import Plan
from loka_compile.probe import observers
from loka_compile.probe.forwards import UNPAIRED
from loka_compile.probe.forwards import Forward
from loka_compile.probe.listing import say_memory
from loka_compile.probe.places import Places
from loka_compile.probe.session import Session
from loka_compile.probe.session import session
from loka_compile.probing import Late
from loka_compile.readers import of_weights
from loka_compile.recovery import Recovery
from loka_compile.telling import Teller
from loka_compile.variants import Built
from loka_compile.variants import Variants

if TYPE_CHECKING:
    from loka_compile.scoring import Scorer

if of_weights not in captured.WATCHERS:
    captured.WATCHERS.append(of_weights)


class Runtime:
    #: Calibration decides and binds in its own way.
    decides: type[Decisions] = Decisions
    binds: type[Binder] = Binder

    def __init__(
        self, source: Source, options: Options, plan: Plan | None, environment: Environment
    ) -> None:
        self.source = source
        self.options = options
        check_patterns({s.name: s.features for s in source.sites}, options, registered_layers())
        eligible = eligibility.eligible(source.sites, source.device, options)
        self.probe: Session = session(
            options.probe_dir,
            rows_on_disk=options.probe_rows_on_disk,
            weight_model=options.probe_weight_model,
        )
        self.teller = Teller(source, options, environment, eligible)
        self.variants = Variants(source, options, self.teller.say_once)
        self.decisions = self.decides(source, options, plan, eligible, self.teller)
        self.decisions.steps = self.probe.steps
        self.peers = Peers(source, options, self.decisions, self.teller)
        self.binder = self.binds(
            source, options, self.decisions, self.variants, self.peers, self.probe, self.teller
        )
        self._lock = threading.RLock()
        self._replayed = options.records_graphs
        self.recovery = Recovery(source, self.variants, self.decisions, self.teller, self._lock)
        self._ids = self.binder.ids
        self._memo: dict[tuple[int, ...], Binding] = {}
        #: What was bound when a decision moved, while a backward may still come.
        self._before: dict[tuple[int, ...], Binding] = {}
        self._version = LEDGER.version
        self._demoted = demotion.count()
        #: What Dynamo's own compile bound.
        self._prepared: Callable[[], Binding | None] = lambda: None

    # -- calls ------------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        demotion.BOARD.called(self.source.training)
        if self._version != LEDGER.version and not _compat.in_backward():
            self._forget()
        binding = self._memo.get(self._ids(args))
        if self._before:
            binding = self._as_before(binding, args)
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
        return self._run(binding, binding.built, args, binding.extra)

    def _run(self, binding: Binding, built: Built, args: Args, states: tuple[Tensor, ...]) -> Any:
        try:
            out = built.fn(*args, *states)
        except Exception as error:
            # Inside a backward a checkpoint runs its forward again, and stops it by an exception.
            mine = built.decided.kernels and not _compat.in_backward()
            if mine and demotion.may_be_a_kernel(error):
                return self.recovery.forward(binding, args, error)
            raise
        if binding.guarded:
            self.recovery.guard(out, binding, args)
        return out

    def binding_of(self, args: Args) -> Binding | None:
        """What these parameters are bound to at present."""
        return self._memo.get(self._ids(args))

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
        # calls may write to what is saved, which autograd would refuse.
        states = tuple(t.data for t in binding.extra)
        places = binding.places
        forward = self._starts(places, again=recomputed)
        meter = None if recomputed else binding.meter
        timed = contextlib.nullcontext() if meter is None else meter.forward(binding.steps, args)
        with observers.forward_of(forward, again=recomputed), timed:
            out = self._run(binding, binding.built, args, states)
        if binding.scorer is not None and binding.built.states and not recomputed:
            with _compat.outside_modes():
                self._score(binding.scorer, binding.steps, args, out, states)
        if meter is not None:
            meter.backward(out, binding.steps)
        if forward is not None and binding.watch:
            if not recomputed:
                binding.saw_forward()
            if binding.built.states and not recomputed:
                with _compat.outside_modes():
                    self.probe.probed(binding.entries, self.probe.resumed + binding.steps)
            if not recomputed:
                binding.pending.add(forward)
                binding.outside |= not _compat.in_backward()

            def before_backward() -> None:
                binding.pending.discard(forward)
                if places is not None:
                    places.goes_through(forward)
                self._backward_ran(binding)
                _compat.set_versions_to_zero(states)

            on_backward(out, before_backward)
        return out

    def _starts(self, places: Places | None, *, again: bool) -> Forward | None:
        """What stands for the forward that starts; None where no backward can follow."""
        if not self.source.training:
            return None
        if places is None:
            return Forward()
        # A user may record graphs, too: what is decided here would be replayed as it is.
        replayed = self._replayed or (
            self.source.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        )
        forward, paired = places.starts(again=again, replayed=replayed)
        if not paired:
            self.teller.say_once(UNPAIRED)
        return forward

    def _score(
        self, scorer: Scorer, steps: int, args: Args, out: Any, states: tuple[Tensor, ...]
    ) -> None:
        """gate="budget": one backward more, where the Scorer wants one."""
        weights = self.binder.weights(args)
        statistics = {
            s.name: LEDGER.entry(weights[s.name]).statistics.get((s.call, "g"))
            for s in self.source.sites
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
                self.binder.build_late(binding, late, args)
            step = late.took_place()
        late.active = late.active and late.built is not None
        built, extra = binding.built, binding.extra
        if late.active and late.built is not None and late.places is not None:
            built, extra = late.built, late.places.tensors
        states = tuple(t.data for t in extra)
        places = late.places if late.active else None
        forward = self._starts(places, again=again)
        with observers.forward_of(forward, again=again):
            out = self._run(binding, built, args, states)
        if forward is not None and (late.active or late.careful):
            if late.careful and not again:
                late.pending.add(forward)
            if late.active and not again:
                late.waiting.add(forward)

            def before_backward() -> None:
                late.pending.discard(forward)
                late.waiting.discard(forward)
                if places is not None:
                    places.goes_through(forward)
                _compat.set_versions_to_zero(states)

            on_backward(out, before_backward)
        if step and late.active:
            news = None if late.turns is None else late.turns.news()
            with _compat.outside_modes():
                self.probe.probed(binding.entries, step, news)
        if not late.careful:
            late.active = False
        return out

    def _renewed(self, binding: Binding, args: Args) -> Binding:
        stamp = binding.stamp
        if stamp is not None and not binding.backward_ran and self.binder.moved(stamp, args):
            # A checkpoint was loaded after the first call: look again.
            binding = self._bind(args)
        if binding.talk is None and binding.ready:
            # torch.distributed may have been set up since: no plan is made past the others.
            binding = self._bind(args)
        if binding.talk is not None:
            binding.talk.clock += 1
            decided = self._settle(binding, args)
        elif decided := binding.ready:
            self._make_plan(args)
        return self._bind(args) if decided else binding

    def _forget(self) -> None:
        with self._lock:
            self._version = LEDGER.version
            if self._demoted != demotion.count():
                # Not a choice of layers that share a graph: what they agreed on goes, too.
                self._demoted = demotion.count()
                self.decisions.forget()
            # Of two moves in one step, the first one's forwards came first.
            held = {**self._memo, **self._before}
            self._before = held if self._awaited(held) else {}
            self._memo = {}
            self.binder.forget_dead()

    def _as_before(self, binding: Binding | None, args: Args) -> Binding | None:
        """A checkpoint's second forward, inside the backward, gets what its first one had."""
        if _compat.in_backward():
            return self._before.get(self._ids(args), binding)
        # A forward of its own: what comes behind it is its.
        self._before.pop(self._ids(args), None)
        if not self._awaited(self._before):
            self._before = {}
        return binding

    @staticmethod
    def _awaited(held: dict[tuple[int, ...], Binding]) -> bool:
        """A backward may still come, of what runs FP8 or of what is observed."""
        return bool(PENDING) or any(binding.pending for binding in held.values())

    def _backward_ran(self, binding: Binding) -> None:
        first = not binding.backward_ran
        binding.saw_backward()
        if first and binding.decision.sticks:
            mods.settle(binding.entries, binding.decision.mods, binding.decision.layers)

    def _bind(self, args: Args, inputs: list[Any] | None = None) -> Binding:
        demotion.BOARD.attend(self.source.training)
        with self._lock:
            binding = self.binder.bind(args, inputs)
            binding.guarded = self.recovery.guards(binding.built.decided.kernels)
            self._memo[binding.key] = binding
            return binding

    @_compat.outside_modes()
    def _make_plan(self, args: Args) -> None:
        """Quantify every observed site of every set of parameters that was probed, and decide.

        args: of the step that is about to run, whose rows no probe has seen.
        """
        with self._lock:
            for binding in list(self.binder.last.values()):
                if binding.alive and (binding.ready or (binding.steps and binding.backward_ran)):
                    unseen = args if binding.key == self._ids(args) else None
                    observed = self.decisions.observed(binding, self.binder.positions)
                    self.decisions.adopt(observed, self.decisions.propose(observed, unseen))
            self.teller.report.note(f"plan made after {PROBE_STEPS} probed steps")
            held = [binding.entries for binding in self.binder.last.values()]
            self.teller.report.note(say_memory(entry for one in held for entry in one))
            self._decided()

    @_compat.outside_modes()
    def _settle(self, binding: Binding, args: Args) -> bool:
        """The same with other ranks in it: True once they have agreed, and all change now."""
        with self._lock:
            settled = self.peers.settle(binding, self.binder.positions, args)
            if settled:
                self._decided()
            return settled

    def _decided(self) -> None:
        self.decisions.forget()
        LEDGER.touch()
        self._forget()
