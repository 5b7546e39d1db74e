"""A report -> one self-contained page: no network, no fonts, no files beside it.

This module says what is on the page; `template.html.j2` how it stands there.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import TYPE_CHECKING
from typing import Any

import jinja2

from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import EMULATED
from loka_compile.passes.records import Note
from loka_compile.passes.records import PassRecord
from loka_compile.report import dump
from loka_compile.report import explain
from loka_compile.report import gains
from loka_compile.report import plots
from loka_compile.report import saved
from loka_compile.report import tables
from loka_compile.report.collect import GraphReport
from loka_compile.report.coverage import WHY
from loka_compile.report.sides import Diff
from loka_compile.report.sides import Pool
from loka_compile.report.sides import side_by_side

if TYPE_CHECKING:
    from loka_compile.report.explain import Report


@dataclass
class Kind:
    """All notes that say the same: how many, and of which layers and lines."""

    what: str
    count: int = 0
    places: list[tuple[str, str, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Shown:
    """The diff of one pass, or of all of them."""

    name: str
    diff: Diff
    #: The page shows the same diff already, under this title.
    same_as: str = ""


@dataclass(frozen=True)
class GraphView:
    label: str
    mods: str
    variants: list[str]
    passes: list[PassRecord]
    notes: list[str]
    diffs: list[Shown]
    has_texts: bool


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("loka_compile", "report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["number"] = _number
    environment.filters["span"] = lambda us: gains.span(us).replace("us", "µs")
    return environment.get_template("template.html.j2")


def render(report: Report, diffs: bool = True) -> str:
    sites, pool = report.sites, Pool()
    known: dict[tuple[str, str, str], str] = {}
    graphs = [_graph_view(g, i, pool, known, diffs) for i, g in enumerate(report.graphs)]
    page = _template().render(
        ran=_ran(report),
        graphs=graphs,
        coverage=tables.coverage(sites),
        eager=report.eager,
        why_eager=WHY,
        coverage_line=tables.coverage_line(sites),
        warnings=list(_warnings(report, sites)),
        changes=_kinds(report.notes(explain.changes_of)),
        changed=_in_short(report.notes(explain.changes_of)),
        shares=gains.shares(sites),
        time=gains.total(sites),
        rewrites=_kinds(report.notes(explain.rewrites_of)),
        refusals=report.notes(explain.refusals_of),
        sites=[_site_view(report, s) for s in sites],
        directions=DIRECTIONS,
        legend=tables.LEGEND,
        plot=plots.error_plot(sites),
        bars=plots.time_bars(sites),
        pool=list(pool.numbers),
        diffs=diffs,
    )
    return page.lstrip()


def _ran(report: Report) -> dict[str, str]:
    ran = dict(report.ran or saved.ran_on())
    ran["date"] = str(ran.get("date", "")).replace("T", " ")
    shown = ("date", "device", "loka_compile", "torch", "triton", "torchao", "fbgemm", "deep_gemm")
    return {k: str(ran[k]) for k in (*shown, "python", "platform") if ran.get(k)}


def _kinds(notes: Iterable[tuple[Note, int]]) -> list[Kind]:
    kinds: dict[str, Kind] = {}
    for note, n in notes:
        kind = kinds.setdefault(note.what, Kind(note.what))
        kind.count += n
        kind.places.append((note.where, note.line, n))
    return list(kinds.values())


def _in_short(notes: Iterable[tuple[Note, int]]) -> list[tuple[str, int]]:
    """Kinds of changes without widths, with counts: `layer_norm -> block_norm`."""
    kinds: Counter[str] = Counter()
    for note, n in notes:
        kinds[re.sub(r" over \d+ features.*? -> (\w+) of \d+", r" -> \1", note.what)] += n
    return kinds.most_common()


def _warnings(report: Report, sites: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for index, graph in enumerate(report.graphs):
        for record in explain.records_of(graph):
            if record.error:
                yield f"graph {index}: {tables.say_failed(record)}"
        if graph.mods is not None and graph.mods.provisional:
            yield f"graph {index}: whether Mods are on is provisional until the first backward"
    sources = {c.get("source") for s in sites for c in tables.choices(s).values()}
    if "emulated" in sources:
        yield "FP8 is emulated: errors are those of FP8, speed was not measured"


def _graph_view(
    graph: GraphReport,
    index: int,
    pool: Pool,
    known: dict[tuple[str, str, str], str],
    diffs: bool,
) -> GraphView:
    texts = dump.texts(graph) if diffs else []
    return GraphView(
        label=graph.label,
        mods=explain.say_mods(graph),
        variants=graph.variants,
        passes=explain.records_of(graph),
        notes=graph.notes,
        diffs=list(_diffs(texts, index, pool, known)),
        has_texts=bool(texts),
    )


def _diffs(
    texts: list[PassRecord], index: int, pool: Pool, known: dict[tuple[str, str, str], str]
) -> Iterator[Shown]:
    """Of each pass, and of all together. What an earlier graph shows is only named."""
    if not texts:
        return
    whole = PassRecord("all passes", before=texts[0].before, after=texts[-1].after)
    for record in [*texts, whole]:
        before, after = dump.plain(record.before), dump.plain(record.after)
        key = (record.name, before, after)
        if key in known and before != after:
            yield Shown(record.name, Diff([], 0, 0), known[key])
            continue
        known[key] = f"graph {index}"
        yield Shown(record.name, side_by_side(before, after, pool))


def _site_view(report: Report, site: Mapping[str, Any]) -> dict[str, Any]:
    found = tables.choices(site)
    kernels = {d: tables.short(c["kernel"]) for d, c in found.items()}
    return {
        **site,
        "choices": found,
        "kernels": kernels,
        "fp8": {d for d, c in found.items() if tables.is_fp8(c)},
        "emulated": any(c["kernel"].endswith(EMULATED) for c in found.values()),
        "error": tables.error_of(site),
        "speedup": gains.overall(site),
        "speedups": tables.speedup_text(found),
        "reasons": tables.reasons_of(site) + tables.pays_of(site),
        "unfused": "" if site.get("fused") else report.unfused(site["name"]),
        "told": list(report.told_of(site["name"])),
    }


def _number(value: Any, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}g}"
