"""One set of parameters that runs through a graph: what the callable remembers of it."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import TYPE_CHECKING
from typing import Any

from torch import Tensor

from loka_compile import mods
from loka_compile.agreement import Agreement
from loka_compile.ledger import Entry
from loka_compile.lowering.weight_cache import Cache
from loka_compile.options import PROBE_STEPS
from loka_compile.plan import SitePlan
from loka_compile.probe.forwards import Forward
from loka_compile.probe.places import Places
from loka_compile.probe.plain_steps import Cells
from loka_compile.probing import Late
from loka_compile.step_meter import StepMeter
from loka_compile.variants import Built

if TYPE_CHECKING:
    from loka_compile.scoring import Scorer

Args = tuple[Any, ...]


@dataclass(eq=False)
class Binding:
    """One set of parameters that runs through this graph."""

    key: tuple[int, ...]
    entries: list[Entry]
    decision: mods.Decision
    built: Built
    #: What the graph takes behind its own inputs.
    extra: tuple[Tensor, ...] = ()
    #: What its observers look at: parameters, and which use of each.
    uses: list[tuple[Entry, int]] = field(default_factory=list)
    #: Where its observers find their state; the first of `extra` tell them.
    places: Places | None = None
    #: Quantised weights behind them, in an inference graph.
    cache: Cache | None = None
    #: What plain steps record, in a training graph.
    cells: Cells | None = None
    #: Its backward runs kernels that might fail.
    guarded: bool = False
    #: True while something is to be looked at around each call.
    watch: bool = False
    #: Forwards whose backward may still come.
    pending: weakref.WeakSet[Forward] = field(default_factory=weakref.WeakSet)
    #: False once one of the parameters is gone.
    alive: bool = True
    steps: int = 0
    #: Has been called outside a backward. A reentrant checkpoint's graph never is.
    outside: bool = False
    backward_ran: bool = False
    #: While the Mods decision is provisional.
    stamp: mods.Stamp | None = None
    site_plans: dict[str, SitePlan] = field(default_factory=dict)
    #: A checkpoint around the graph has run its forward again.
    recomputed: bool = False
    #: With other ranks, until a common plan is in force.
    talk: Agreement | None = None
    #: Probing once the plan is in force.
    late: Late | None = None
    #: gate="budget": what predicts the loss of kernels, while this is probed.
    scorer: Scorer | None = None
    #: What a step takes, while it is probed and where that may count.
    meter: StepMeter | None = None
    #: Loss of the assignment that was chosen with it, on rows that no probe saw.
    replayed_nats: float | None = None

    @property
    def ready(self) -> bool:
        """The early probes are done, forward and backward, and no plan has been made of them.

        Of other graphs of these parameters, too (a graph per batch size): what observers record
        belongs to parameters. Only the budget's score is of the rows of one graph.
        """
        if not self.quiet or self.built.decided.observed <= self.site_plans.keys():
            return False
        if self.scorer is not None or not self.uses:
            return self.backward_ran and self.steps >= PROBE_STEPS
        return all(
            entry.forwards.get(call, 0) >= PROBE_STEPS and call in entry.backwards
            for entry, call in self.uses
        )

    @property
    def quiet(self) -> bool:
        """A swap may come now.

        A checkpoint around us compares what its forward and its recomputation save, so none may
        come between the two. Where none has shown itself for long, what still waits for a backward
        hinders nothing: the next batch's forward came first, or a program keeps its losses.
        """
        return not self.pending or (self.steps >= 2 * PROBE_STEPS and not self.recomputed)

    def saw_forward(self) -> None:
        self.steps += 1
        for entry, call in self.uses:
            entry.forwards[call] = entry.forwards.get(call, 0) + 1

    def saw_backward(self) -> None:
        self.backward_ran = True
        for entry, call in self.uses:
            entry.backwards.add(call)

    def variants(self) -> list[Built]:
        late = None if self.late is None else self.late.built
        return [self.built] if late is None else [self.built, late]

    def release(self) -> None:
        self.alive = False
        self.entries, self.extra, self.cache, self.late, self.talk = [], (), None, None, None
        self.scorer = self.cells = self.places = None
        self.uses = []


def picker(positions: Sequence[int]) -> Callable[[Args], tuple[Any, ...]]:
    """args -> those at `positions`. itemgetter of one position is a scalar."""
    if not positions:
        return lambda args: ()
    if len(positions) == 1:
        only = positions[0]
        return lambda args: (args[only],)
    return operator.itemgetter(*positions)


def identities(positions: Sequence[int]) -> Callable[[Args], tuple[int, ...]]:
    """args -> ids of those at `positions`, for the memo."""
    pick = picker(positions)
    return lambda args: tuple(map(id, pick(args)))
