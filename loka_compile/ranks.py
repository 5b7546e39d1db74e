"""The other ranks of a torch.distributed program, and the store through which they are spoken to.

Through the store, not by collectives: those must come in one order on all ranks, and may be waited
for by a rank that never runs this graph. Nothing here blocks: what is not there yet is not there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch.distributed as dist

from loka_compile import _compat


@dataclass(eq=False)
class World:
    """The ranks of the default process group."""

    store: Any
    rank: int
    size: int
    #: name -> how many channels of that name this process has opened.
    opened: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def name_of(what: Iterable[tuple[Any, ...]]) -> str:
        return hashlib.sha256(repr(sorted(what)).encode()).hexdigest()[:16]

    def channel(self, name: str) -> Channel:
        """The n-th of this name here speaks to the n-th of this name on the other ranks."""
        number = self.opened.get(name, 0)
        self.opened[name] = number + 1
        return Channel(self, f"loka/{name}/{number}", name)


_WORLD: World | None = None


def world() -> World | None:
    """None in a process without torch.distributed, or alone in it."""
    global _WORLD
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    store = _compat.default_store()
    if _WORLD is None or _WORLD.store is not store:
        _WORLD = World(store, dist.get_rank(), dist.get_world_size())
    return _WORLD


class Channel:
    """Messages about one thing: short texts by name, one per rank or one for all."""

    def __init__(self, world: World, prefix: str, name: str = "") -> None:
        self.world = world
        self.name = name
        self.rank = world.rank
        self._prefix = prefix
        self._said: set[str] = set()

    def put(self, what: str, value: str) -> None:
        self.world.store.set(self._key(what), value)

    def has(self, what: str) -> bool:
        return bool(self.world.store.check([self._key(what)]))

    def get(self, what: str) -> str:
        """Only of what is there: the store waits for what is not."""
        return str(self.world.store.get(self._key(what)).decode())

    def first(self, what: str, value: str) -> str:
        """Say `value` for all, unless a rank has said something before; what stands now."""
        return str(self.world.store.compare_set(self._key(what), "", value).decode())

    def once(self, what: str, value: str) -> None:
        """Say `value` for this rank, one time; it is counted after it can be read."""
        if what not in self._said:
            self._said.add(what)
            self.put(f"{what}/{self.rank}", value)
            self.world.store.add(self._key(f"{what}#"), 1)

    def count(self, what: str) -> int:
        """How many ranks have said `what`."""
        return int(self.world.store.add(self._key(f"{what}#"), 0))

    def ranks(self, what: str) -> list[int]:
        """Which of them."""
        return [r for r in range(self.world.size) if self.has(f"{what}/{r}")]

    def append(self, what: str, value: str) -> None:
        """Add to a list that all ranks share, and read in one order."""
        number = self.world.store.add(self._key(f"{what}#"), 1)
        self.put(f"{what}/{number}", value)

    def behind(self, what: str, read: int) -> list[str]:
        """What that list holds behind its first `read`; one question where that is nothing."""
        found: list[str] = []
        for number in range(read + 1, self.count(what) + 1):
            if not self.has(f"{what}/{number}"):
                break  # Counted, and not written yet: it comes next time, and so do later ones.
            found.append(self.get(f"{what}/{number}"))
        return found

    def _key(self, what: str) -> str:
        return f"{self._prefix}/{what}"
