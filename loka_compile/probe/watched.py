"""What a session keeps of one set of parameters between probes, and numbers on their way to it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field

import torch
from torch import Tensor

from loka_compile.probe.listing import ROLES
from loka_compile.probe.listing import Probed
from loka_compile.probe.listing import site_name
from loka_compile.probe.statistics import BATCHES
from loka_compile.probe.statistics import HEAD
from loka_compile.probe.statistics import RING
from loka_compile.probe.statistics import SCALARS
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.weights import Record

#: The quantity beside maxima and sizes.
ERROR = "forward error"

#: A site and "x" or "g".
Key = tuple[str, str]


@dataclass
class Watched:
    record: Record
    names: list[str]
    #: The first of the parameters: their records end with it.
    alive: weakref.ref[Tensor]
    #: Probed steps so far.
    probes: int = 0
    #: id of what is watched -> it, and its name.
    _named: dict[int, tuple[weakref.ref[Statistics], Key]] = field(default_factory=dict)

    def named(
        self, entries: Iterable[Probed], some: Sequence[Statistics] | None
    ) -> list[tuple[Statistics, Key]]:
        """`some` with their names, those that are of these entries; None: all of them."""
        if some is not None and all(self._knows(one) for one in some):
            return [(one, self._named[id(one)][1]) for one in some]
        # Not at every probe: a late one looks at a few, the same ones again and again.
        found = [
            (one, (site_name(entry, call), role))
            for entry in entries
            for (call, role), one in entry.statistics.items()
        ]
        self._named = {id(one): (weakref.ref(one), name) for one, name in found}
        wanted = None if some is None else set(map(id, some))
        return [each for each in found if wanted is None or id(each[0]) in wanted]

    def _knows(self, one: Statistics) -> bool:
        known = self._named.get(id(one))
        return known is not None and known[0]() is one


@dataclass
class Looked:
    """Numbers on their way to the host: the scalars of each key, one behind the other, then the
    error of one site, where there is any."""

    keys: list[Key]
    erring: str | None
    numbers: Tensor
    step: int
    done: torch.cuda.Event | None

    @classmethod
    def at(cls, keys: list[Key], erring: str | None, numbers: Tensor, step: int) -> Looked:
        if numbers.device.type != "cuda":
            return cls(keys, erring, numbers.cpu(), step, None)
        done = torch.cuda.Event()
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True, device="cpu")
        host.copy_(numbers, non_blocking=True)
        done.record()
        return cls(keys, erring, host, step, done)

    def read(
        self, fed: dict[tuple[int, str, str], float], owner: int
    ) -> Iterator[tuple[str, str, float]]:
        """(site, quantity, value) of what is new; fed: batches of each series when it was last
        read, which are brought up to date. Waits for the device, if it has not got there."""
        if self.done is not None:
            self.done.synchronize()
        # A few of many numbers: lists of them all would take the most of it.
        numbers = self.numbers.numpy()
        for at, (site, role) in enumerate(self.keys):
            batches = float(numbers[at * SCALARS + BATCHES])
            if batches < 1 or fed.get((owner, site, role)) == batches:
                # Nothing new: a probe after the plan may leave sites out.
                continue
            fed[owner, site, role] = batches
            slot = at * SCALARS + HEAD + int(batches - 1) % RING
            yield site, f"{ROLES[role]} maximum", float(numbers[slot])
            yield site, f"{ROLES[role]} RMS", float(numbers[slot + RING])
        if self.erring is not None:
            yield self.erring, ERROR, float(numbers[-1])
