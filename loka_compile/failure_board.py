"""Kernels that failed on some rank, told to all: what one rank gives up, every rank gives up.

Through the store, as `agreement` does: nobody waits, and no collective is added. A rank that fails
goes on at once, in high precision; the others follow at the end of one of their next steps. For a
few steps in between the ranks run different kernels, which no collective of the program sees.

Others look at the end of an optimizer step, never between a forward and its backward: a checkpoint
in between would recompute with other kernels than it saved for. A process that only infers looks
when a graph is called.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from loka_compile.ranks import Channel
from loka_compile.ranks import World
from loka_compile.ranks import world

log = logging.getLogger("loka_compile")

#: (kernel, direction, K, N, why).
Failure = tuple[str, str, int, int, str]

#: Seconds between looks: one takes a round trip to the store.
EVERY = 1.0


class Board:
    """This process's view of it. `next`: when to look again, never without other ranks."""

    def __init__(self, hear: Callable[[int, Failure], None]) -> None:
        """hear: told (rank, failure) of every message in the one order that all ranks read."""
        self.next = math.inf
        self._hear = hear
        self._channel: Channel | None = None
        self._world: World | None = None
        self._read = 0
        self._trains = False
        self._hooked = False

    def attend(self, training: bool = False) -> None:
        """Look from now on, if there are other ranks; called whenever a graph is bound."""
        self._trains |= training
        here = world()
        if here is self._world:
            return
        self._world, self._read, self.next = here, 0, math.inf
        self._channel = None if here is None else Channel(here, "loka/failures")
        if here is not None:
            self.next = 0.0
            if not self._hooked:
                self._hooked = True
                register_optimizer_step_post_hook(lambda *_: self.look_if_due())

    def say(self, failure: Failure) -> None:
        """Tell all ranks. Without others, nothing."""
        self.attend()
        if self._channel is not None:
            channel = self._channel
            self._safely(lambda: channel.append("failed", json.dumps([channel.rank, *failure])))
            # Two ranks may fail at once: all keep what was said first.
            self.look()

    def called(self) -> None:
        """A graph without gradients is called."""
        if not self._trains:
            self.look_if_due()

    def look_if_due(self) -> None:
        if time.monotonic() >= self.next:
            self.look()

    def look(self) -> None:
        self.next = time.monotonic() + EVERY
        self._safely(self._read_on)

    def _read_on(self) -> None:
        if self._channel is None:
            return
        for text in self._channel.behind("failed", self._read):
            self._read += 1
            rank, kernel, direction, k, n, why = json.loads(text)
            self._hear(int(rank), (str(kernel), str(direction), int(k), int(n), str(why)))

    def _safely(self, call: Callable[[], Any]) -> None:
        """A store that is gone never ends the program: each rank then speaks for itself."""
        try:
            call()
        except Exception as error:
            log.debug("failures cannot be shared", exc_info=error)
            self.next, self._channel = math.inf, None
