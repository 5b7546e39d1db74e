"""Probed steps after the plan is in force: one call in about `probe_every` runs observers too.

A plain step counts down one integer. The probed variant has the plan's kernels plus observers; it
is compiled at its first step, and plain steps never run it. Nothing here changes a plan.

A checkpoint around the compiled graph runs the forward again inside the backward and compares what
both saved, so both must be of one variant: such graphs change variant only while no backward is
still to come (`Late.careful`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from loka_compile.options import PROBE_STEPS
from loka_compile.probe.places import Places
from loka_compile.probe.schedule import Schedule
from loka_compile.probe.turns import Turns
from loka_compile.variants import Built


@dataclass(eq=False)
class Late:
    """Late probing of one set of parameters in one graph."""

    schedule: Schedule
    #: Steps so far, plain ones included up to the last probe.
    step: int
    #: Calls until the next probed one.
    left: int = 0
    built: Built | None = None
    #: Where its observers find their state.
    places: Places | None = None
    #: None where all sites are looked at by every probe.
    turns: Turns | None = None
    #: True until it is known that no checkpoint around the graph recomputes it.
    careful: bool = True
    #: True where such a recomputation has been seen.
    recomputed: bool = False
    calls: int = 0
    #: Is the probed variant in force (matters to careful graphs only).
    active: bool = False
    pending: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    #: Probed forwards whose backward is still to come.
    waiting: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    @classmethod
    def starting(cls, schedule: Schedule, step: int) -> Late | None:
        late = cls(schedule, step)
        return late if late._arm() else None

    def _arm(self) -> bool:
        at = self.schedule.next_after(max(self.step, self.schedule.early))
        if at is None:
            return False
        self.left = at - self.step
        self._target = at
        return True

    def took_place(self) -> int:
        """The due step is probed now: returns its number and arms the next one."""
        self.step = self._target - self.left
        self._arm()
        if self.turns is not None and not self.waiting:
            # Else gradients are still to come, of the sites whose inputs were looked at.
            self.turns.take()
        return self.step

    def saw_call(self, recompute: bool) -> None:
        """Carefulness ends once the early calls have shown no recomputation."""
        self.recomputed |= recompute
        self.calls += 1
        if self.calls > 2 * PROBE_STEPS and not self.recomputed and not self.active:
            self.careful = False
