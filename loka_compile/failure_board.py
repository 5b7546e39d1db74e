"""Kernels that failed on some rank, told to all: what one rank gives up, every rank gives up.

Through the store, as `agreement` does: nobody waits, and no collective is added. A rank that fails
goes on at once, in high precision; the others follow at one of their next steps, each at its own.
For a few steps in between the ranks run different kernels, which no collective of the program sees:
what goes into a graph and comes out of it has the same shapes and dtypes whatever runs inside, and
a gradient that is summed over ranks may have been computed more exactly on one of them. So nothing
has to be agreed on beforehand, and no step is counted. (A rank that compiles its new variant keeps
the others waiting at their next collective, which makes their next look due: they compile then.)

When to look matters all the same: never between a forward and its backward, for a checkpoint in
between would recompute with other kernels than it saved for. There are two such moments:

    the end of an optimizer step, for loops with torch.optim
    the start of a forward while no earlier forward's backward may still come, for all loops

What is pending is known from the autograd nodes of the graphs (`PENDING`). A graph whose node is
not known (inner="eager") leaves the first moment only. A process that only infers looks when a
graph is called. A call compares two floats, and once a second, at most, and only with other ranks,
asks the store one question.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from loka_compile import _compat
from loka_compile.ranks import Channel
from loka_compile.ranks import World
from loka_compile.ranks import world

log = logging.getLogger("loka_compile")

#: (kernel, direction, K, N, why).
Failure = tuple[str, str, int, int, str]

#: Seconds between looks: one takes a round trip to the store.
EVERY = 1.0

#: How often, at once, the store is asked again where it raises.
ATTEMPTS = 3

#: Forwards of this process whose backward may still come: ids of what stands for them. A set of
#: ints is changed in one step, whatever thread a backward runs in.
PENDING: set[int] = set()


class Board:
    """This process's view of it. `next`: when to look again, never without other ranks."""

    def __init__(
        self,
        hear: Callable[[int, Failure], None],
        known: Callable[[], Iterable[Failure]] = tuple,
    ) -> None:
        """hear: told (rank, failure) of every message in the one order that all ranks read.
        known: what failed here before there was anyone to tell."""
        self.next = math.inf
        self._hear = hear
        self._known = known
        self._channel: Channel | None = None
        self._world: World | None = None
        self._read = 0
        self._trains = False
        #: A forward was not to be followed: what is pending is not known.
        self.blind = False
        self._hooked = False
        #: Backwards run in threads of their own, and each message is to be heard once.
        self._lock = threading.RLock()

    def attend(self, training: bool = False) -> None:
        """Look from now on, if there are other ranks; called whenever a graph is bound."""
        self._trains |= training
        here = world()
        if here is self._world:
            return
        with self._lock:
            self._world, self._read, self.next = here, 0, math.inf
            self._channel = None if here is None else Channel(here, f"loka/{here.life}/failures")
            if here is None:
                return
            self.next = 0.0
            if not self._hooked:
                self._hooked = True
                register_optimizer_step_post_hook(lambda *_: self.look_if_due())
            for failure in list(self._known()):
                self._say(failure)

    def say(self, failure: Failure) -> None:
        """Tell all ranks. Without others, nothing."""
        self.attend()
        if self._channel is not None:
            self._say(failure)
            # Two ranks may fail at once: all keep what was said first.
            self.look()

    def _say(self, failure: Failure) -> None:
        channel = self._channel
        if channel is not None:
            text = json.dumps([channel.rank, *failure])
            self._safely(lambda: channel.append("failed", text, self._read))

    @property
    def listens(self) -> bool:
        """There are other ranks to be heard."""
        return self._channel is not None

    def called(self, training: bool) -> None:
        """A graph is about to be called; `training`: with gradients."""
        if time.monotonic() < self.next:
            return
        if training:
            if self.blind or PENDING or _compat.in_backward():
                return
        elif self._trains:
            return
        self.look()

    def look_if_due(self) -> None:
        if time.monotonic() >= self.next:
            self.look()

    def look(self) -> None:
        # The group may be gone, and another there.
        self.attend()
        if self.listens:
            with self._lock:
                self.next = time.monotonic() + EVERY
                self._safely(self._read_on)

    def _read_on(self) -> None:
        assert self._channel is not None
        for text in self._channel.behind("failed", self._read):
            self._read += 1
            rank, kernel, direction, k, n, why = json.loads(text)
            self._hear(int(rank), (str(kernel), str(direction), int(k), int(n), str(why)))

    def _safely(self, call: Callable[[], Any]) -> None:
        """A store that is gone never ends the program: each rank then speaks for itself.

        What is said or read twice is said or read once, so a store that fails once is asked again.
        """
        for attempt in range(ATTEMPTS):
            try:
                return call()
            except Exception as error:
                log.debug("failures cannot be shared", exc_info=error)
                if attempt + 1 == ATTEMPTS:
                    self.next, self._channel = math.inf, None
                    log.warning(
                        "loka: the other ranks cannot be reached (%s: %s): a kernel that fails at "
                        "run time is given up on the rank where it does, alone",
                        *(type(error).__name__, error),
                    )
        return None
