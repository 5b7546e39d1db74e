"""What passes leave behind for the report: plain data, no graph, no tensor."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field


@dataclass
class Note:
    """One thing a pass did or declined. `where` is a layer name, `line` the user's source line."""

    where: str
    what: str
    line: str = ""


@dataclass
class PassRecord:
    """One run of one pass over a graph and its sub-graph bodies."""

    name: str
    ms: float = 0.0
    nodes_before: int = 0
    nodes_after: int = 0
    #: Changes of the model's function (Mods), listed to the user once and loudly.
    changes: list[Note] = field(default_factory=list)
    #: Exact rewrites: the same maths in another order.
    rewrites: list[Note] = field(default_factory=list)
    #: Near misses, each with its reason.
    refusals: list[Note] = field(default_factory=list)
    #: What `why` tells of a site that nothing was tried on.
    remarks: list[Note] = field(default_factory=list)
    #: Canonical text of the graph before and after; empty unless somebody asked for diffs.
    before: str = ""
    after: str = ""
    error: str = ""

    @property
    def matches(self) -> int:
        return len(self.changes) + len(self.rewrites)
