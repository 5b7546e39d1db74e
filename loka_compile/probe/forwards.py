"""Whose gradients are these: a token that goes from a forward to its backward, kept on the host.

A step may run a model several times before the first backward (two towers, a contrastive loss,
micro-batches that are summed), whose gradients then come back in the opposite order; a forward may
have no backward at all, or two. So every forward gets a Forward, which the hook on its results
names before their gradients go through the graph (Passing). A site's Pairing says which of its
inputs, counted from the first, each Forward brought.

Only numbers of inputs and of candidates for the reservoir (`statistics.py`) are counted here, and
only differences of them are used: what is on the device may have begun elsewhere, and stays there.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from dataclasses import field

#: Inputs of one site whose gradients are waited for; those of older ones are not paired any more.
OPEN = 64

#: What is said where that cannot be done.
UNPAIRED = (
    "a probed forward ran before the backward of the one before it, and CUDA graphs cannot tell "
    "their rows apart: wgrad is not estimated, and stays in high precision. For a plan of all "
    "three directions probe without CUDA graphs (no mode), and pin that plan"
)


class Forward:
    """Stands for one forward; lives as long as its autograd graph. named: observers are told."""

    __slots__ = ("__weakref__", "backward", "named", "seen")

    def __init__(self, *, named: bool = True) -> None:
        self.named = named
        self.seen: dict[Pairing, list[Seen]] = {}
        #: The last backward that went through it.
        self.backward: int | None = None


@dataclass(eq=False)
class Passing:
    """Of one graph and set of parameters: the forward whose gradients go through it."""

    _forward: weakref.ref[Forward] | None = None

    def starts(self, forward: Forward) -> None:
        self._forward = weakref.ref(forward)

    @property
    def known(self) -> bool:
        return self._forward is not None

    @property
    def forward(self) -> Forward | None:
        return None if self._forward is None else self._forward()


@dataclass(frozen=True, eq=False)
class Seen:
    """One input of one site: its number, and its candidates for the reservoir."""

    number: int
    first: int
    count: int
    forward: weakref.ref[Forward]


@dataclass(eq=False)
class Pairing:
    """Of one site: how far its input and its gradient have been recorded."""

    #: Inputs, and their candidates.
    batches: int = 0
    candidates: int = 0
    #: Gradients, and the candidates that the gradient's state counts as its own.
    gradients: int = 0
    covered: int = 0
    #: Does the gradient's state hold rows.
    filled: bool = False
    #: Rows of the two are not paired, and nothing can be done about it.
    mixed: bool = False
    #: Inputs whose gradient has not come.
    open: list[Seen] = field(default_factory=list)
    #: Of graphs that are replayed without us: forwards, and backwards.
    started: int = 0
    ended: int = 0

    def resumes(self, batches: int, *, filled: bool) -> None:
        """State of an earlier run goes on, in which so many more inputs than gradients were seen;
        filled: does it hold rows."""
        self.batches, self.filled = batches, filled

    def saw_input(self, count: int, forward: Forward | None) -> None:
        if forward is not None:
            one = Seen(self.batches, self.candidates, count, weakref.ref(forward))
            forward.seen.setdefault(self, []).append(one)
            self.open.append(one)
        self.batches += 1
        self.candidates += count

    def saw_gradient(self, covered: int) -> None:
        """covered: candidates of the input that the gradient's state counts now."""
        self.gradients += 1
        self.covered = covered
        self.filled = True

    def take(self, forward: Forward | None) -> Seen | None:
        """The input that this gradient belongs to: of several of one forward the last."""
        seen = None if forward is None else forward.seen.get(self)
        if not seen:
            return None
        one = seen.pop()
        if one not in self.open:
            return None
        self.open.remove(one)
        return one

    def follows(self, seen: Seen) -> bool:
        """Is this the gradient that comes next, with no later input recorded."""
        return (self.gradients, self.covered, self.batches) == (
            seen.number,
            seen.first,
            seen.number + 1,
        )

    def lost(self) -> list[Seen]:
        """Inputs whose gradient cannot come any more, or is no longer waited for; each once."""
        if not self.open:
            return []
        late = len(self.open) - OPEN
        gone = [one for at, one in enumerate(self.open) if at < late or one.forward() is None]
        if gone:
            self.open = [one for one in self.open if one not in gone]
        return gone

    def behind(self, seen: Seen) -> int:
        """Candidates of inputs that came later."""
        return self.candidates - seen.first - seen.count

    def replays(self) -> bool:
        """One more forward of a graph that may be replayed. False where the rows that it records
        are not those of the next gradient: one is still to come, or came twice; for good."""
        paired = self.started == self.ended
        self.mixed |= not paired
        self.started += 1
        return paired
