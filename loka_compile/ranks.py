"""The other ranks of a torch.distributed program, and the store through which they are spoken to.

Through the store, not by collectives: those must come in one order on all ranks, and may be waited
for by a rank that never runs this graph. Nothing here blocks: what is not there yet is not there.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from loka_compile import _compat


class World:
    """The ranks of the default process group.

    store: held weakly. Who keeps the store of a group that was destroyed keeps its server too, and
    the next group at the same address would find that one instead of its own.
    """

    def __init__(self, store: Any, rank: int, size: int, life: int = 1) -> None:
        """life: which group of this process over the same keys this is."""
        self._store = weakref.ref(store)
        self.rank = rank
        self.size = size
        self.life = life
        #: name -> how many channels of that name this process has opened.
        self.opened: dict[str, int] = {}

    @property
    def store(self) -> Any:
        """Raises RuntimeError once the process group is gone."""
        store = self._store()
        if store is None:
            raise RuntimeError("the process group was destroyed")
        return store

    def is_of(self, store: Any) -> bool:
        return self._store() is store

    @staticmethod
    def name_of(what: Iterable[tuple[Any, ...]]) -> str:
        return hashlib.sha256(repr(sorted(what)).encode()).hexdigest()[:16]

    def channel(self, name: str) -> Channel:
        """The n-th of this name here speaks to the n-th of this name on the other ranks."""
        with _LOCK:
            number = self.opened.get(name, 0)
            self.opened[name] = number + 1
        return Channel(self, f"loka/{self.life}/{name}/{number}", name)


_WORLD: World | None = None
_LOCK = threading.Lock()


def world() -> World | None:
    """None in a process without torch.distributed, or alone in it."""
    global _WORLD
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    store = _compat.default_store()
    with _LOCK:
        if _WORLD is None or not _WORLD.is_of(store):
            _WORLD = World(store, dist.get_rank(), dist.get_world_size(), _life(store))
        return _WORLD


def _life(store: Any) -> int:
    """1, unless an earlier group left its keys: what was said there is not said here."""
    try:
        return int(store.add(f"loka/lives/{dist.get_rank()}", 1))
    except Exception:
        # Whatever is said through it will fail, and be dealt with there.
        return 1


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

    def has(self, *what: str) -> bool:
        """All of these are there. One question, however many."""
        return not what or bool(self.world.store.check([self._key(one) for one in what]))

    def get(self, what: str) -> str:
        """Only of what is there: the store waits for what is not."""
        return str(self.world.store.get(self._key(what)).decode())

    def first(self, what: str, value: str) -> str:
        """Say `value` for all, unless a rank has said something before; what stands now."""
        return str(self.world.store.compare_set(self._key(what), "", value).decode())

    def once(self, what: str, value: str) -> None:
        """Say `value` for this rank, one time; it is counted after it can be read."""
        if what not in self._said:
            self.put(f"{what}/{self.rank}", value)
            self.world.store.add(self._key(f"{what}#"), 1)
            self._said.add(what)

    def count(self, what: str) -> int:
        """How many ranks have said `what`; more where the store lost an answer to one of them."""
        return int(self.world.store.add(self._key(f"{what}#"), 0))

    def ranks(self, what: str) -> list[int]:
        """Which of them."""
        every = range(self.world.size)
        if self.has(*(f"{what}/{r}" for r in every)):
            return list(every)
        return [r for r in every if self.has(f"{what}/{r}")]

    def said(self, what: str, ranks: Sequence[int]) -> dict[int, str]:
        """What those of `ranks` said that have."""
        keys = {r: f"{what}/{r}" for r in ranks}
        if not self.has(*keys.values()):
            keys = {r: key for r, key in keys.items() if self.has(key)}
        store = self.world.store
        if len(keys) > 1 and store.has_extended_api():
            found = store.multi_get([self._key(key) for key in keys.values()])
            return {r: str(one.decode()) for r, one in zip(keys, found, strict=True)}
        return {r: self.get(key) for r, key in keys.items()}

    def append(self, what: str, value: str, read: int) -> None:
        """Add to a list that all ranks share, and read in one order, behind its first `read`.

        Number and text come in one step: a rank that dies between two would leave a hole, and
        nobody reads past one. `value` must be of this rank alone.
        """
        number = read + 1
        while self.first(f"{what}/{number}", value) != value:
            number += 1

    def behind(self, what: str, read: int) -> list[str]:
        """What that list holds behind its first `read`; one question where that is nothing."""
        found: list[str] = []
        while self.has(f"{what}/{read + len(found) + 1}"):
            found.append(self.get(f"{what}/{read + len(found) + 1}"))
        return found

    def _key(self, what: str) -> str:
        return f"{self._prefix}/{what}"
