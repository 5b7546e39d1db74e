"""Run passes in order: each is timed, counted, linted, dumped and diffed by one wrapper, here."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Protocol

from torch import fx

from loka_compile import _compat
from loka_compile.mod_set import ON
from loka_compile.mod_set import ModSet
from loka_compile.options import Options
from loka_compile.passes import graph as g
from loka_compile.passes.graph_text import text_of
from loka_compile.passes.records import Note
from loka_compile.passes.records import PassRecord


@dataclass
class PassContext:
    """What a pass may ask for, and where it says what it did."""

    options: Options
    #: Names of the sites that count as heads: they keep their bias and high precision.
    heads: frozenset[str] = frozenset()
    #: The Mods in force; a pass of one that is off is not run.
    mods: ModSet = ON
    record: PassRecord = field(default_factory=lambda: PassRecord(""))

    def changed(self, node: fx.Node, what: str) -> None:
        """The model's function changed here (a Mod)."""
        self.record.changes.append(Note(g.layer_of(node), what, g.line_of(node)))

    def rewrote(self, node: fx.Node, what: str) -> None:
        """The same maths, written differently."""
        self.record.rewrites.append(Note(g.layer_of(node), what, g.line_of(node)))

    def refused(self, node: fx.Node, why: str) -> None:
        """A near miss: what almost matched here, and why it was left alone."""
        self.record.refusals.append(Note(g.layer_of(node), why, g.line_of(node)))

    def remarked(self, node: fx.Node, what: str) -> None:
        """No near miss, but worth an answer when somebody asks about this site."""
        self.record.remarks.append(Note(g.layer_of(node), what, g.line_of(node)))


class Pass(Protocol):
    """Edits one graph in place. Bodies of higher-order ops are visited by the manager."""

    name: str

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None: ...


def run_pass(
    one: Pass,
    gm: fx.GraphModule,
    context: PassContext,
    *,
    keep_text: bool = False,
    recompile: bool = True,
) -> PassRecord:
    """Run `one` over `gm` and all bodies below it. Raises what the pass raises.

    recompile: make the module's code anew; without, `gm` may not be called before that is done.
    """
    record = context.record = PassRecord(one.name)
    record.nodes_before = _count(gm)
    if keep_text:
        record.before = text_of(gm)
    start = time.perf_counter()
    for graph_module in list(g.every_graph(gm)):
        with _compat.saved_tensors_unhooked():
            one(graph_module, context)
        graph_module.graph.lint()
        if recompile:
            graph_module.recompile()
    record.ms = (time.perf_counter() - start) * 1e3
    record.nodes_after = _count(gm)
    if keep_text:
        record.after = text_of(gm)
    return record


def run_passes(
    passes: Sequence[Pass],
    gm: fx.GraphModule,
    context: PassContext,
    *,
    keep_text: bool = False,
    optional: Iterable[str] = (),
    on_record: Callable[[PassRecord], None] | None = None,
) -> tuple[fx.GraphModule, list[PassRecord]]:
    """All passes in order; one named in `optional` (a user's) that raises is undone and told."""
    records = []
    for one in passes:
        undo = g.own_copy(gm) if one.name in optional else None
        try:
            # Code is made once, at the end: for a large graph it takes as long as the passes.
            record = run_pass(one, gm, context, keep_text=keep_text, recompile=False)
        except Exception:
            if undo is None:
                raise
            gm = undo
            record = context.record
            record.changes, record.rewrites = [], []
            record.error = traceback.format_exc(limit=8)
        records.append(record)
        if on_record is not None:
            on_record(record)
    for graph_module in g.every_graph(gm):
        graph_module.recompile()
    return gm, records


def _count(gm: fx.GraphModule) -> int:
    return sum(len(one.graph.nodes) for one in g.every_graph(gm))
