"""Which compiled code and weights a recorded CUDA graph belongs to; see `kernels/captured.py`."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from loka_compile.ledger import LEDGER


@dataclass(frozen=True)
class WeightReaders:
    """variants: the compiled code. storages: the weights' memory, which a graph that the user
    records reads without that code."""

    variants: frozenset[weakref.ref[Any]]
    storages: frozenset[StorageWeakRef]

    def left(self) -> bool:
        alive = any(one() is not None for one in self.variants)
        return alive or not all(one.expired() for one in self.storages)


def of_weights(addresses: tuple[int, ...]) -> WeightReaders | None:
    """Who reads the parameters at these addresses; None where one of them is none."""
    wanted, found = set(addresses), set()
    variants: set[weakref.ref[Any]] = set()
    storages: set[StorageWeakRef] = set()
    for entry in LEDGER.entries():
        parameter = entry.ref()
        try:
            address = None if parameter is None else parameter.data_ptr()
        except Exception:
            # Of a kind that has no memory of its own.
            continue
        if parameter is None or address not in wanted:
            continue
        found.add(address)
        storages.add(StorageWeakRef(parameter.untyped_storage()))
        for holder in list(entry.holders):
            variants.update(weakref.ref(one) for one in holder.variants())
    if found != wanted:
        return None
    return WeightReaders(frozenset(variants), frozenset(storages))
