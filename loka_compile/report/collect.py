"""What the report is made of: one GraphReport per Dynamo graph, gathered by open Reports."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from loka_compile.options import Environment
from loka_compile.passes.records import PassRecord


@dataclass
class GraphReport:
    """What happened to one graph. `replay` runs its passes again, with texts, for diffs."""

    label: str
    prepared: list[PassRecord]
    environment: Environment
    sites: list[dict[str, Any]] = field(default_factory=list)
    records: list[PassRecord] = field(default_factory=list)
    variants: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mods: Any = None
    replay: Callable[[], list[PassRecord]] | None = None
    #: Where the graph runs, e.g. `cuda:0`; "" when not known.
    device: str = ""
    #: Layers that a given plan names, and layers that were looked up in it.
    planned: frozenset[str] = frozenset()
    met: set[str] = field(default_factory=set)

    def note(self, what: str) -> None:
        if what not in self.notes:
            self.notes.append(what)

    def update(
        self,
        sites: list[dict[str, Any]],
        records: Sequence[PassRecord],
        label: str,
        decision: Any,
        replay: Callable[[], list[PassRecord]],
    ) -> None:
        """A variant came into force."""
        self.sites = sites
        self.records = list(records)
        if not self.variants or self.variants[-1] != label:
            self.variants.append(label)
        self.mods = decision
        self.replay = replay

    def change_counts(self, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, int]:
        """Changes of the function by kind, of the passes whose name is `wanted`."""
        return dict(Counter(n.what for r in self.records if wanted(r.name) for n in r.changes))


_OPEN: list[Any] = []
_SAID: set[Any] = set()
_LOCK = threading.Lock()


def open_report(report: Any) -> None:
    with _LOCK:
        _OPEN.append(report)


def close_report(report: Any) -> None:
    with _LOCK:
        _OPEN.remove(report)


def seen(graph: GraphReport) -> None:
    """A graph was compiled or bound while these reports were open."""
    for report in _OPEN:
        report.add(graph)


def say_once(key: Any, say: Callable[..., None], *args: Any) -> None:
    """Call `say(*args)` the first time `key` is met in this process."""
    with _LOCK:
        if key in _SAID:
            return
        _SAID.add(key)
    say(*args)
