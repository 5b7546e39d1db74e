"""`with explain() as report:` call the model; the report says what was done to it, and why."""

from __future__ import annotations

import operator
import os
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from loka_compile.errors import ReportFileError
from loka_compile.errors import UnknownReportNameError
from loka_compile.files import write_text
from loka_compile.ledger import LEDGER
from loka_compile.mod_set import by_mod
from loka_compile.mod_set import missing
from loka_compile.passes.records import Note
from loka_compile.passes.records import PassRecord
from loka_compile.report import collect
from loka_compile.report import coverage
from loka_compile.report import dump
from loka_compile.report import gains
from loka_compile.report import saved
from loka_compile.report import tables
from loka_compile.report.collect import GraphReport

Pick = Callable[[PassRecord], list[Note]]
changes_of: Pick = operator.attrgetter("changes")
refusals_of: Pick = operator.attrgetter("refusals")
remarks_of: Pick = operator.attrgetter("remarks")


def rewrites_of(record: PassRecord) -> list[Note]:
    """Exact ones. What `dispatch` and `observe` did, the sites and their notes tell."""
    return [] if record.name in ("dispatch", "observe") else record.rewrites


@contextmanager
def explain(model: torch.nn.Module | None = None) -> Iterator[Report]:
    """Gather a report on every graph that is compiled or called in the block.

    Callables that were compiled before look their decisions up once more, and so report too.
    model: its linears that no graph holds are listed as left eager.
    """
    report = Report()
    if model is not None:
        report.expect(model)
    collect.open_report(report)
    LEDGER.touch()
    try:
        yield report
    finally:
        collect.close_report(report)


class Report:
    """A live view: after the block it keeps up with what happens to its graphs."""

    def __init__(self) -> None:
        self.graphs: list[GraphReport] = []
        #: Date, versions and machine, where the report was read from a file.
        self.ran: dict[str, Any] | None = None
        #: Linears that should be in some graph.
        self.expected: list[coverage.Linear] = []

    def expect(self, model: torch.nn.Module) -> None:
        """Report on `model`'s linears also where no graph holds them. Keeps names, no weights."""
        found = coverage.linears_of(model)
        self.expected += [one for one in found if one not in self.expected]

    @property
    def eager(self) -> list[coverage.Linear]:
        """Linears of the models given to `explain` or `expect` that are in no graph."""
        return coverage.left_eager(self.expected, self.sites)

    def add(self, graph: GraphReport) -> None:
        if not any(one is graph for one in self.graphs):
            self.graphs.append(graph)

    @property
    def sites(self) -> list[dict[str, Any]]:
        """Rows `name, M, K, N, dtype, count, fused, directions` of all graphs, each site once."""
        return tables.merge_sites(self.graphs)

    @property
    def unmet(self) -> list[str]:
        """Layers that a given plan names and no graph has: of another model, or not run yet."""
        planned = frozenset().union(*(graph.planned for graph in self.graphs))
        return sorted(planned.difference(*(graph.met for graph in self.graphs)))

    @property
    def changes(self) -> list[str]:
        """Changes of the model's function: `bias removed: 9 (mlp.0, mlp.3, ...)`."""
        return tables.note_lines(self.notes(changes_of))

    @property
    def rewrites(self) -> list[str]:
        """Exact rewrites and fusions, in the form of `changes`."""
        return tables.note_lines(self.notes(rewrites_of))

    @property
    def refusals(self) -> list[str]:
        """Near misses: `layer: reason (at model.py:41)`; and passes that failed."""
        found = self.notes(refusals_of)
        lines = [_at(note) + (f" x{n}" if n > 1 else "") for note, n in found]
        failed = (r for graph in self.graphs for r in records_of(graph) if r.error)
        return [*lines, *dict.fromkeys(tables.say_failed(r) for r in failed)]

    def notes(self, pick: Pick) -> list[tuple[Note, int]]:
        """Notes of all graphs with counts. Train and eval graphs tell the same things: once."""
        most: Counter[tuple[str, str, str]] = Counter()
        for graph in self.graphs:
            most |= Counter((n.where, n.what, n.line) for r in records_of(graph) for n in pick(r))
        return [(Note(*key), n) for key, n in most.items()]

    def diff(self, pass_name: str | None = None, graph: int = 0) -> str:
        """Unified diff of one pass, or of the whole pipeline; "" when nothing changed.

        The passes are run again for it, on a private copy.
        """
        if not 0 <= graph < len(self.graphs):
            raise UnknownReportNameError("graph", graph, map(str, range(len(self.graphs))))
        records = dump.texts(self.graphs[graph])
        if not records:
            raise UnknownReportNameError("diff of graph", graph, [])
        if pass_name is not None:
            picked = [r for r in records if r.name == pass_name]
            if not picked:
                raise UnknownReportNameError("diff of pass", pass_name, [r.name for r in records])
            return "".join(map(dump.pass_diff, picked))
        first, last = records[0], records[-1]
        return dump.unified(first.before, last.after, f"before {first.name}", f"after {last.name}")

    def why(self, name: str) -> str:
        """All that is known about one linear, in a few sentences.

        name: as in `sites`, or that of its weight or bias. Raises UnknownReportNameError.
        """
        sites = self.sites
        for suffix in ("", ".weight", ".bias"):
            found = [
                s for s in sites if name.endswith(suffix) and s["name"] == name.removesuffix(suffix)
            ]
            if found:
                break
        eager = {one.name: one for one in self.eager}
        if not found and name in eager:
            one = eager[name]
            return f"{name}: a linear of K={one.K}, N={one.N}, {coverage.WHY}."
        if not found:
            known = [*(s["name"] for s in sites), *eager]
            raise UnknownReportNameError("site", name, known)
        return "\n".join(" ".join(self._sentences(site)) for site in found)

    def _sentences(self, site: dict[str, Any]) -> Iterator[str]:
        name, count = site["name"], site.get("count") or 1
        shape = ", ".join(f"{key}={site[key]}" for key in ("M", "K", "N"))
        times = f", {count} times" if count > 1 else ""
        yield f"{name}: a linear of {shape} in {site['dtype']}{times}."
        yield f"Fused as {site['fused']}." if site.get("fused") else self.unfused(name)
        said: dict[str, list[str]] = {}
        for direction, choice in tables.choices(site).items():
            said.setdefault(_say_choice(choice), []).append(direction)
        for what, directions in said.items():
            yield f"{', '.join(directions)}: {what}."
        yield from self.told_of(name)

    def unfused(self, name: str) -> str:
        """Why a site is in no fused op, in one sentence."""
        found = [n.what for n, _ in self.notes(remarks_of) if n.where == name]
        return f"{found[0][:1].upper()}{found[0][1:]}." if found else "Not fused."

    def told_of(self, name: str) -> Iterator[str]:
        """What passes and notes say of one site."""
        picks = (("Changed", changes_of), ("Rewritten", rewrites_of), ("Left alone", refusals_of))
        for title, pick in picks:
            notes = [n for n, _ in self.notes(pick) if n.where in (name, name.partition("#")[0])]
            if notes:
                yield f"{title} there: {'; '.join(_at(n, layer=False) for n in notes)}."
        said_of = dict.fromkeys(n for graph in self.graphs for n in graph.notes)
        yield from (f"{n}." for n in said_of if n.startswith(f"{name}:"))

    def summary(self) -> str:
        """A few lines: graphs, Mods, changes, coverage."""
        many = "graph" if len(self.graphs) == 1 else "graphs"
        lines = [f"loka: {len(self.graphs)} {many}"]
        lines += [f"  {g.label}: Mods {say_mods(g)}" for g in self.graphs]
        lines += [f"  changed: {line}" for line in self.changes]
        if self.refusals:
            lines.append(f"  left alone: {len(self.refusals)}, see report.refusals")
        lines += [f"  {line}" for line in self._covered()]
        return "\n".join(lines) + "\n"

    def text(self) -> str:
        """The whole report."""
        if not self.graphs:
            return "loka: no graph was seen. Call the compiled model inside the block.\n"
        lines: list[str] = []
        for index, graph in enumerate(self.graphs):
            lines += [f"Graph {index}: {graph.label}", f"  Mods: {say_mods(graph)}"]
            lines.append(f"  variants: {'; then '.join(graph.variants) or 'none yet'}")
            lines += [f"  {line}" for line in tables.pass_lines(records_of(graph))]
            lines += [f"  note: {note}" for note in graph.notes]
            lines.append("")
        sections = {
            "Model changes (Mods: the function is different)": self.changes,
            "Exact rewrites (the same function)": self.rewrites,
            "Left alone, and why": self.refusals,
        }
        for title, body in sections.items():
            lines += [title, *(f"  {line}" for line in body or ["none"]), ""]
        lines += ["GEMM sites", *tables.site_lines(self.sites), tables.LEGEND, ""]
        return "\n".join([*lines, *self._covered()]) + "\n"

    def _covered(self) -> list[str]:
        missed = []
        for what, named, why in (
            ("left eager", [one.name for one in self.eager], coverage.WHY),
            ("only in the plan", self.unmet, "no graph so far has them"),
        ):
            listed = ", ".join(named[:6]) + (", ..." if len(named) > 6 else "")
            missed += [f"{what}: {len(named)} ({listed}), {why}"] if named else []
        sites = self.sites
        return [tables.coverage_line(sites), *gains.lines(sites), *missed]

    def to_dict(self, diffs: bool = False) -> dict[str, Any]:
        """diffs: with the graphs' texts before and after each pass."""
        return {
            "kind": saved.KIND,
            "version": saved.VERSION,
            "torch": torch.__version__,
            "ran": self.ran or saved.ran_on(),
            "graphs": [saved.graph_dict(graph, diffs) for graph in self.graphs],
            **{k: getattr(self, k) for k in ("sites", "changes", "rewrites", "refusals")},
            "coverage": tables.coverage(self.sites),
            "expected": [asdict(one) for one in self.expected],
            "left_eager": [one.name for one in self.eager],
        }

    def save(self, path: str | os.PathLike[str], diffs: bool | None = None) -> Path:
        """Write text (.txt), data (.json) or one page for a browser (.html).

        diffs: with what each pass did to the graphs; by default in .html only.
        Raises ReportFileError for other endings.
        """
        target = Path(path)
        if target.suffix == ".txt":
            return write_text(target, self.text())
        if target.suffix == ".json":
            return saved.write(target, self.to_dict(bool(diffs)))
        if target.suffix == ".html":
            # Here, so that a process that draws nothing does not load jinja2.
            from loka_compile.report import html

            return write_text(target, html.render(self, diffs is not False))
        raise ReportFileError(path)


def records_of(graph: GraphReport) -> list[PassRecord]:
    return [*graph.prepared, *graph.records]


def _at(note: Note, layer: bool = True) -> str:
    where = f"{note.where}: " if layer else ""
    return where + note.what + (f" (at {note.line})" if note.line else "")


def say_mods(graph: GraphReport) -> str:
    if graph.mods is None:
        return "not decided yet"
    until = "; provisional until the first backward" if graph.mods.provisional else ""
    names, kept = graph.mods.mods.names, by_mod(graph.mods.mods.kept)
    text = f"{'on' if names else 'off'} ({graph.mods.why}{until})"
    if names and missing(names):
        text += f"; on: {', '.join(names)}; left off: {', '.join(missing(names))}"
    for mod, layers in kept.items():
        text += f"; kept as written for {mod} (option keep): {', '.join(layers)}"
    return text


def _say_choice(choice: Any) -> str:
    errors = {"clamped MERE": choice.get("mere_clamped"), "MERE": choice.get("mere")}
    parts = [f"{label} {value:.3g}" for label, value in errors.items() if value is not None]
    if choice.get("bad_rows") is not None:
        parts.append(f"{100 * choice['bad_rows']:.2g} % bad rows")
    if choice.get("nats") is not None:
        parts.append(f"predicted loss {choice['nats']:.2g} nats per sample")
    numbers = ", ".join(parts)
    if not tables.is_low(choice):
        refused = f" (the refused kernel: {numbers})" if numbers else ""
        return f"high precision, because {choice.get('reason') or 'no reason recorded'}{refused}"
    speedup = "n/a" if choice.get("speedup") is None else f"{choice['speedup']:.2f}"
    extra = [x for x in (choice.get("source"), choice.get("reason")) if x]
    says = f" ({'; '.join(extra)})" if extra else ""
    return f"{choice['kernel']}{says}, {numbers or 'error not measured'}, speedup {speedup}"
