"""What recorded CUDA graphs read besides their operands, kept as long as one may be replayed.

Nothing says when the last graph that reads an address is gone. But a graph that reads a model's
weights dies with them; and one that the compiler records, with the compiled code too, which models
to come may run at the same addresses. So what such graphs read goes once all of those are gone; for
good stays only what nobody knows the readers of.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch


class Readers(Protocol):
    """Hashable; equal where it stands for the same."""

    def left(self) -> bool:
        """May a graph of theirs still be replayed."""
        ...


Watcher = Callable[[tuple[int, ...]], "Readers | None"]

#: What is kept -> who may replay a graph that reads it; None: nobody knows.
CAPTURED: dict[object, set[Readers | None]] = {}
#: Whoever knows who reads matrices at these addresses; the first one's answer counts.
WATCHERS: list[Watcher] = []
_DEVICES: dict[object, torch.device] = {}
_LOCK = threading.Lock()


def keep(what: object, addresses: tuple[int, ...], device: torch.device) -> None:
    """A CUDA graph is recorded that reads `what`, on `device`, and matrices at these addresses."""
    found = (watcher(addresses) for watcher in WATCHERS)
    readers = next((one for one in found if one is not None), None)
    with _LOCK:
        CAPTURED.setdefault(what, set()).add(readers)
        _DEVICES[what] = device


def sweep(device: torch.device) -> None:
    """Let go of what nothing reads any more; not while a graph is recorded."""
    # Backwards run in threads of their own, one per device.
    with _LOCK:
        gone = []
        for what, readers in CAPTURED.items():
            readers -= {one for one in readers if one is not None and not one.left()}
            if not readers:
                gone.append(what)
        devices = {_DEVICES.pop(what, device) for what in gone}
        for one in devices:
            if one.type == "cuda":
                # The last replay may be under way.
                torch.cuda.synchronize(one)
        for what in gone:
            del CAPTURED[what]
