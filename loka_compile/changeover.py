"""The call at which all ranks change plans: no rank waits, and still all change at the same one.

Hosts run apart, by as many calls as nothing holds them together: whoever names a call cannot know
that the others hear of it before they are past it. So a call is named, and each rank says that it
has seen the name before it gets there. Who gets there first looks whether all have, and says so for
all, or names a later call; the store lets one word stand, so all do the same. A rank that gets
there without having seen it finds another call named, for nobody could say that all had.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from loka_compile.ranks import Channel

#: Calls between the furthest rank that is known and the change; twice as many at each new try.
AHEAD = 3
#: At most so many.
FURTHEST = 64
#: So often it is put off because of a rank that must run what it ran last; then that one follows.
PUT_OFF = 3
#: Calls, and seconds, that a rank waits for the others before it goes on without them. Both: a rank
#: that compiles for minutes holds the others up at their next collective, which costs no calls.
PATIENCE_CALLS = 64
PATIENCE_SECONDS = 60.0
#: Calls of a wait at which the store is asked each time, and how seldom behind them.
EAGER = 16
SELDOM = 8


class Wait:
    """How long one thing has been waited for, from call `clock` on."""

    def __init__(self, clock: int) -> None:
        self._clock = clock
        self._since = time.monotonic()
        self._next = clock

    def is_over(self, clock: int) -> bool:
        calls, seconds = clock - self._clock, time.monotonic() - self._since
        return calls >= PATIENCE_CALLS and seconds >= PATIENCE_SECONDS

    def looks(self, clock: int) -> bool:
        """Is the store to be asked at this call: at each one at first, then now and then."""
        if clock < self._next:
            return False
        self._next = clock + (1 if clock - self._clock < EAGER else SELDOM)
        return True


class Changeover:
    """One rank's side of it. `at`: the call that is named at present."""

    def __init__(self, channel: Channel, clock: int, at: int, ranks: Sequence[int]) -> None:
        """ranks: those that must have seen it."""
        self.channel = channel
        self.at = at
        self.ranks = list(ranks)
        self.in_force = False
        #: It came into force while the store could not be asked.
        self.alone = False
        #: Ranks that were given up.
        self.missing: list[int] = []
        self._round = 0
        self._seen = False
        self._wait = Wait(clock)

    def look(self, clock: int, may: bool = True) -> bool:
        """At the start of call `clock`: is it in force? `may`: False where this call must be as
        the one before. Between seeing a call named and getting there it asks nothing."""
        while not self.in_force:
            if clock < self.at:
                if not self._seen:
                    self.channel.put(self._key(self.channel.rank), "")
                    self._seen = True
                return False
            mine = json.dumps(self._word(clock, may))
            at, self.ranks, self.missing = json.loads(self.channel.first(f"go/{self._round}", mine))
            if at == self.at:
                self.in_force = True
            else:
                self.at, self._round, self._seen = at, self._round + 1, False
        return True

    def look_alone(self, clock: int) -> bool:
        """Where the store is gone: all who have seen the call go by it."""
        self.in_force = self.alone = self._seen and clock >= self.at
        return self._seen

    def __str__(self) -> str:
        """What is to be said of it; empty where nothing is."""
        said = []
        if self.missing:
            said.append(
                f"in force without rank {', '.join(map(str, self.missing))}, which is silent"
            )
        if self.alone:
            said.append("in force without a word from the others: the store cannot be asked")
        return "; ".join(said)

    def _word(self, clock: int, may: bool) -> tuple[int, list[int], list[int]]:
        """(the call, who must have seen it, who is given up), where it is this rank's to say."""
        keys = [self._key(r) for r in self.ranks]
        if (may or self._round >= PUT_OFF) and self.channel.has(*keys):
            return self.at, self.ranks, self.missing
        ranks, missing = self.ranks, self.missing
        if self._wait.is_over(clock):
            ranks = [r for r, key in zip(ranks, keys, strict=True) if self.channel.has(key)]
            missing = sorted({*missing, *self.ranks} - {*ranks})
        return clock + min(AHEAD << self._round, FURTHEST), ranks, missing

    def _key(self, rank: int) -> str:
        return f"seen/{self._round}/{rank}"
