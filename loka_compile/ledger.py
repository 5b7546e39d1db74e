"""What has been decided about which parameter, by identity, for the life of the process.

Dynamo shares one graph between model instances with the same code, and makes several graphs of one
model (train, eval, dynamic batch). Decisions therefore belong to parameters, not to graphs, and are
looked up per call. Copies (deepcopy, EMA) are new parameters and inherit nothing.

`LEDGER.version` moves whenever a decision does; callables drop their memo then.
"""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass
from dataclasses import field
from typing import TYPE_CHECKING
from typing import Any
from typing import Protocol

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.lowering.weight_cache import Stored
from loka_compile.plan import SitePlan
from loka_compile.probe.statistics import Statistics

if TYPE_CHECKING:
    from loka_compile.agreement import Agreement


class Holder(Protocol):
    def release(self) -> None: ...

    def variants(self) -> list[Any]:
        """The compiled code that it runs."""
        ...


@dataclass(eq=False)
class Entry:
    """What is known of one parameter."""

    ref: weakref.ref[Tensor]
    name: str = ""
    #: The Mods in force for this parameter; None: not decided.
    mods: tuple[str, ...] | None = None
    #: (Mod, layer) pairs of this parameter's graphs that are left as written all the same.
    kept: set[tuple[str, str]] = field(default_factory=set)
    #: False until a backward has run: the decision is then read again if the values change.
    settled: bool = False
    #: `apply_mods` made this parameter's model: its function is what eager computes, no more.
    baked: bool = False
    block: int | None = None
    heads: tuple[str, ...] | None = None
    #: Of the norms in this parameter's graphs: name -> block.
    blocks: dict[str, int] = field(default_factory=dict)
    emulated: bool = False
    #: Loss of the whole assignment that this parameter is part of (`Plan.replayed_nats`).
    replayed_nats: float | None = None
    #: n-th use of the parameter in a graph -> decision.
    sites: dict[int, SitePlan] = field(default_factory=dict)
    #: n-th use -> why its forward runs in high precision in spite of that.
    unfit: dict[int, str] = field(default_factory=dict)
    #: (n-th use, "x" or "g") -> statistics.
    statistics: dict[tuple[int, str], Statistics] = field(default_factory=dict)
    #: n-th use -> early probed forwards of it, of whichever graphs.
    forwards: dict[int, int] = field(default_factory=dict)
    #: Uses that a backward has gone through, after such a forward.
    backwards: set[int] = field(default_factory=set)
    #: (forward kernel, dtype, transposed) -> the weight quantised for it, for inference.
    stored: dict[tuple[str, torch.dtype, bool], Stored] = field(default_factory=dict)
    #: Talks with other ranks about the graphs that this parameter's weight comes first in.
    agreements: dict[str, Agreement] = field(default_factory=dict)
    #: (hash of the plan that was given, n-th use) -> what all ranks run in its place.
    agreed: dict[tuple[str, int], SitePlan] = field(default_factory=dict)
    #: What the user was told about this parameter's model: which Mods are on, "off".
    said: set[str] = field(default_factory=set)
    #: What holds this entry's statistics and must let go of them when the parameter dies.
    holders: weakref.WeakSet[Holder] = field(default_factory=weakref.WeakSet)

    def release(self) -> None:
        self.statistics.clear()
        self.forwards.clear()
        self.backwards.clear()
        self.stored.clear()
        for holder in list(self.holders):
            holder.release()


class Ledger:
    def __init__(self) -> None:
        self.version = 0
        self.lock = threading.RLock()
        self._entries: dict[int, Entry] = {}
        #: Modules that `apply_mods` went through.
        self.baked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def entry(self, parameter: Tensor) -> Entry:
        """The entry of `parameter`, made if need be."""
        with self.lock:
            key = id(parameter)
            held = self._entries.get(key)
            if held is None or held.ref() is not parameter:
                held = Entry(weakref.ref(parameter, functools.partial(self._drop, key)))
                self._entries[key] = held
                self._inherit(held, parameter)
            return held

    def _inherit(self, entry: Entry, parameter: Tensor) -> None:
        """What was said of a model before FSDP2 gathered this parameter of it."""
        found = _compat.gathered(parameter)
        if found is None:
            return
        said = self.find(found.sharded)
        if said is not None:
            entry.mods, entry.settled, entry.kept = said.mods, said.settled, set(said.kept)
        # Sharding made new parameters: those that the Mods were baked into are gone.
        entry.baked = found.module in self.baked

    def find(self, parameter: Tensor) -> Entry | None:
        held = self._entries.get(id(parameter))
        return held if held is not None and held.ref() is parameter else None

    def entries(self) -> list[Entry]:
        with self.lock:
            return list(self._entries.values())

    def _drop(self, key: int, ref: weakref.ref[Tensor]) -> None:
        # A recycled id must not hit, neither here nor in a callable's memo.
        held = self._entries.get(key)
        if held is not None and held.ref is ref:
            del self._entries[key]
            held.release()
        self.version += 1

    def touch(self) -> None:
        """Say that a decision moved."""
        with self.lock:
            self.version += 1


LEDGER = Ledger()


def model_entries(model: torch.nn.Module) -> list[tuple[str, Entry]]:
    """(parameter path, entry) of every parameter of `model` that is known."""
    found = [(name, LEDGER.find(parameter)) for name, parameter in parameters_of(model)]
    return [(name, entry) for name, entry in found if entry is not None]


def parameters_of(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """(path, parameter) of every parameter of `model`, and of those that FSDP2 gathers for it."""
    gathered = [
        (one.path or one.name, one.parameter)
        for one in _compat.gathered_of(model)
        if one.parameter is not None
    ]
    return [*model.named_parameters(remove_duplicate=True), *gathered]
