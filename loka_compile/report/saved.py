"""A report as JSON, and back: what was saved prints, diffs and draws like the live one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from loka_compile.errors import ReportFileError
from loka_compile.files import write_text
from loka_compile.mod_set import EVERY
from loka_compile.mod_set import ModSet
from loka_compile.mod_set import by_mod
from loka_compile.mod_set import pairs_of
from loka_compile.mods import Decision
from loka_compile.options import Environment
from loka_compile.passes.records import Note
from loka_compile.passes.records import PassRecord
from loka_compile.report import dump
from loka_compile.report.collect import GraphReport
from loka_compile.report.coverage import Linear

if TYPE_CHECKING:
    from loka_compile.report.explain import Report

KIND = "loka-report"
VERSION = 1
_NOTES = ("changes", "rewrites", "refusals", "remarks")
_FLOATS = ("mere", "mere_clamped", "bad_rows", "nats", "us", "speedup")


def ran_on() -> dict[str, Any]:
    """Date, versions and machine of this process."""
    import torch

    from loka_compile.train.environment import versions

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {"date": datetime.now().astimezone().isoformat(timespec="seconds"), **versions(device)}


def graph_dict(graph: GraphReport, diffs: bool = False) -> dict[str, Any]:
    """diffs: also `texts`, each once, and `diffs`, which of them stood before and after a pass."""
    mods, skip = graph.mods, ("before", "after")
    records = [*graph.prepared, *graph.records]
    body = {
        "label": graph.label,
        "mods": None if mods is None else _decision_dict(mods),
        "variants": list(graph.variants),
        "passes": [{k: v for k, v in asdict(r).items() if k not in skip} for r in records],
        "sites": graph.sites,
        "notes": list(graph.notes),
    }
    if not diffs:
        return body
    texts: dict[str, int] = {}
    shown = [
        {"name": r.name, **{k: texts.setdefault(getattr(r, k), len(texts)) for k in skip}}
        for r in dump.texts(graph)
    ]
    return {**body, "texts": list(texts), "diffs": shown}


def _decision_dict(decision: Decision) -> dict[str, Any]:
    return {
        "on": decision.on,
        "why": decision.why,
        "provisional": decision.provisional,
        "names": list(decision.mods.names),
        "kept": by_mod(decision.mods.kept),
    }


def _decision(body: Mapping[str, Any]) -> Decision:
    """Reports of before Mods had names say on or off only."""
    names = body.get("names", EVERY if body["on"] else ())
    mods = ModSet.of(names, pairs_of(body.get("kept", {})))
    return Decision(mods, body["why"], body["provisional"])


def write(path: Path, body: Mapping[str, Any]) -> Path:
    """JSON has no inf and no nan: they are written as the strings "Infinity" and "NaN"."""
    plain = json.loads(json.dumps(body), parse_constant=str)
    return write_text(path, json.dumps(plain, indent=1) + "\n")


def load(path: str | os.PathLike[str]) -> Report:
    """The report of a .json file that `Report.save` wrote. Raises ReportFileError."""
    from loka_compile.report.explain import Report

    try:
        body = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError:
        raise ReportFileError(path, "it is not JSON") from None
    if not isinstance(body, dict) or body.get("kind") != KIND:
        raise ReportFileError(path, "it is not a report that report.save() wrote")
    if body.get("version") != VERSION:
        why = f"it is of version {body.get('version')}, this loka_compile reads {VERSION}"
        raise ReportFileError(path, why)
    try:
        report = Report()
        report.ran = dict(body.get("ran") or {"torch": body["torch"]})
        report.expected = [Linear(**one) for one in body.get("expected", [])]
        for graph in body["graphs"]:
            report.add(_graph(graph))
        report.text()
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        raise ReportFileError(path, f"it is damaged ({type(e).__name__}: {e})") from None
    return report


def _graph(body: Mapping[str, Any]) -> GraphReport:
    mods = body["mods"]
    kept = _texts(body)
    return GraphReport(
        label=body["label"],
        prepared=[],
        environment=Environment(False, (), None),
        sites=[_site(s) for s in body["sites"]],
        records=[_record(r) for r in body["passes"]],
        variants=list(body["variants"]),
        notes=list(body["notes"]),
        mods=None if mods is None else _decision(mods),
        replay=(lambda: kept) if kept else None,
    )


def _texts(body: Mapping[str, Any]) -> list[PassRecord]:
    texts = body.get("texts", [])
    return [
        PassRecord(d["name"], before=texts[d["before"]], after=texts[d["after"]])
        for d in body.get("diffs", [])
    ]


def _record(body: Mapping[str, Any]) -> PassRecord:
    return PassRecord(**{**body, **{k: [Note(**n) for n in body.get(k, [])] for k in _NOTES}})


def _site(body: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that were written as text become numbers again."""
    directions = {
        direction: {k: float(v) if k in _FLOATS and isinstance(v, str) else v for k, v in c.items()}
        for direction, c in body["directions"].items()
    }
    return {**body, "directions": directions}
