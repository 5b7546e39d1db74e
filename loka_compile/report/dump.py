"""Per-pass texts and diffs, and where they go: LOKA_DUMP files, LOKA_LOGS lines, TORCH_TRACE.

`emit` is called whenever a variant of a graph comes into force. Nobody pays for it who has set
none of the three: graph texts are made by running the passes again, and only on demand.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import logging
import re
import threading
import weakref
from collections.abc import Iterable
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._logging import trace_structured

from loka_compile.files import write_text
from loka_compile.options import Environment
from loka_compile.passes.records import PassRecord
from loka_compile.report import collect
from loka_compile.report import runnable
from loka_compile.report.collect import GraphReport

log = logging.getLogger("loka_compile")
_TRACE = logging.getLogger("torch.__trace")

LOGS = ("passes", "dispatch", "probe")


def texts(graph: GraphReport) -> list[PassRecord]:
    """The graph's passes with `before` and `after` filled in; empty when it cannot be replayed.

    What ran before sites were named (`canonicalize`) is there when its text was kept.
    """
    if graph.replay is None:
        return []
    replayed = graph.replay()
    names = {r.name for r in replayed}
    kept = [r for r in graph.prepared if r.after and r.name not in names]
    return [*kept, *(r for r in replayed if r.after)]


def unified(before: str, after: str, old: str, new: str) -> str:
    """Unified diff of two graph texts; "" when they are equal."""
    lines = difflib.unified_diff(
        plain(before).splitlines(), plain(after).splitlines(), old, new, lineterm=""
    )
    out = "\n".join(lines)
    return out + "\n" if out else ""


def plain(text: str) -> str:
    """Functions among the arguments print with their address, which would differ at each run."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def pass_diff(record: PassRecord) -> str:
    return unified(record.before, record.after, f"before {record.name}", f"after {record.name}")


# -- emit -----------------------------------------------------------------------------------------

_LOCK = threading.Lock()
_NUMBERS = itertools.count()


class _Told:
    """What has been said about one graph: its number, and a fingerprint per variant."""

    def __init__(self, graph: GraphReport, number: int) -> None:
        # A recycled id must not pass for the old graph.
        key = id(graph)
        self.ref = weakref.ref(graph, lambda _: _TOLD.pop(key, None))
        self.number = number
        self.variants: list[tuple[object, ...]] = []


_TOLD: dict[int, _Told] = {}


def emit(graph: GraphReport, environment: Environment, index: int | None = None) -> None:
    """Say what became of `graph`, once per variant, wherever the user asked for it.

    index: number of the graph in file names; None counts them in order. Never raises: a full disk
    must not break a compile.
    """
    traced = tracing()
    if environment.dump is None and not environment.logs and not traced:
        return
    try:
        told = _new_variant(graph, index)
        if told is None:
            return
        if environment.logs:
            _log(graph, environment.logs)
        if environment.dump is None and not traced:
            return
        files = list(_files(graph, texts(graph)))
        if environment.dump is not None:
            _dump(_folder(environment.dump, graph, told), files)
        if traced:
            _trace(files)
    except Exception:
        log.warning("loka: the report of %s could not be written", graph.label, exc_info=True)


def tracing() -> bool:
    """Is some structured trace written (TORCH_TRACE). Handlers without a folder write nothing."""
    return any(getattr(h, "root_dir", "") is not None for h in _TRACE.handlers)


def _new_variant(graph: GraphReport, index: int | None) -> _Told | None:
    """None when this variant was told before: callables bind again whenever a decision moves."""
    kernels = [c["kernel"] for s in graph.sites for c in s["directions"].values()]
    variant = (graph.variants[-1:], kernels)
    with _LOCK:
        told = _TOLD.get(id(graph))
        if told is None or told.ref() is not graph:
            told = _Told(graph, next(_NUMBERS) if index is None else index)
            _TOLD[id(graph)] = told
        if variant in told.variants:
            return None
        told.variants.append(variant)
        return told


def _folder(root: Path, graph: GraphReport, told: _Told) -> Path:
    """`<nn>_<graph>`, later variants `<nn>_<graph>_v2`; below `rank<n>` in distributed runs."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        root = root / f"rank{torch.distributed.get_rank()}"
    nth = len(told.variants)
    name = f"{told.number:02d}_{_slug(graph.label.partition(' (')[0])}"
    return root / (name if nth == 1 else f"{name}_v{nth}")


def _slug(text: str) -> str:
    return re.sub(r"\W+", "_", text).strip("_")[:60]


def _files(graph: GraphReport, records: list[PassRecord]) -> Iterator[tuple[str, str]]:
    """(name, text): what is written for one variant of a graph, to LOKA_DUMP and to TORCH_TRACE.

    The graphs are programs: `python after.py` runs one on made-up inputs.
    """

    def program(text: str, when: str) -> str:
        return runnable.program(plain(text), f"{graph.label}, {when}", graph.device)

    if records:
        yield "before.py", program(records[0].before, "as Dynamo made it")
        yield "after.py", program(records[-1].after, "as it is compiled")
    for number, record in enumerate(records):
        name = f"{number:02d}.{_slug(record.name)}"
        diff = pass_diff(record)
        yield f"{name}.diff", diff or f"# {record.name} changed nothing\n"
        if diff:
            yield f"{name}.py", program(record.after, f"after {record.name}")


def _dump(folder: Path, files: Iterable[tuple[str, str]]) -> None:
    written = {write_text(folder / name, text) for name, text in files}
    if written:
        for old in set(folder.glob("[0-9][0-9].*")) - written:
            # Of an earlier run with more passes: it would read as part of this one.
            old.unlink(missing_ok=True)


def _trace(files: Iterable[tuple[str, str]]) -> None:
    """Artifacts `loka.<file name>`; a pass that changed nothing leaves none."""
    for name, text in files:
        if not text.startswith("# "):
            trace_structured(
                "artifact",
                metadata_fn=functools.partial(dict, name=f"loka.{name}", encoding="string"),
                payload_fn=functools.partial(str, text),
                # A plan is swapped in between two steps, where no compile is going on.
                expect_trace_id=False,
            )


class _Shown(logging.StreamHandler):
    """Silent as soon as the user has configured logging: then theirs prints the lines."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def show_logs() -> None:
    """Make INFO lines of the "loka_compile" logger visible, whatever logging is set up."""
    with _LOCK:
        if not log.isEnabledFor(logging.INFO):
            log.setLevel(logging.INFO)
        if not log.handlers:
            log.addHandler(_Shown())


def _log(graph: GraphReport, wanted: tuple[str, ...]) -> None:
    show_logs()
    unknown = ",".join(w for w in wanted if w not in LOGS)
    if unknown:
        say = "loka: LOKA_LOGS=%s: unknown; want some of %s"
        collect.say_once(("LOKA_LOGS", unknown), log.warning, say, unknown, ",".join(LOGS))
    for name, make in zip(LOGS, (_pass_lines, _site_lines, _probe_lines), strict=True):
        if name in wanted:
            log.info("loka: %s: %s", name, graph.label)
            for line in make(graph):
                log.info("loka: %s:   %s", name, line)


def _pass_lines(graph: GraphReport) -> Iterable[str]:
    for r in [*graph.prepared, *graph.records]:
        counts = f"{r.matches} matches, {len(r.refusals)} refused"
        failed = "; failed and undone" if r.error else ""
        nodes = f"{r.nodes_before} -> {r.nodes_after} nodes"
        yield f"{r.name}: {counts}, {nodes}, {r.ms:.2f} ms{failed}"
        for kind, notes in (("", [*r.changes, *r.rewrites]), ("left alone: ", r.refusals)):
            for note in notes:
                line = f" ({note.line})" if note.line else ""
                yield f"  {note.where}: {kind}{note.what}{line}"


def _site_lines(graph: GraphReport) -> Iterable[str]:
    # Here, so that a process that logs nothing does not load rich.
    from loka_compile.report.tables import site_lines

    return site_lines(graph.sites)


def _probe_lines(graph: GraphReport) -> Iterable[str]:
    yield from graph.variants[-1:]
    yield from graph.notes
    for site in graph.sites:
        for direction, c in site["directions"].items():
            if c["mere_clamped"] is not None:
                yield (
                    f"{site['name']} {direction}: {c['kernel']}, clamped MERE "
                    f"{c['mere_clamped']:.3g}, MERE {c['mere']:.3g}, bad rows "
                    f"{100 * c['bad_rows']:.2g} %" + (f" ({c['reason']})" if c["reason"] else "")
                )
