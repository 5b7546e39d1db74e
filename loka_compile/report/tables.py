"""Tables of a report. Site rows (as `planner.table` makes them), pass records, notes -> text.

The error of a site is `mere_clamped`, the largest of its FP8 directions; where none is FP8, the
largest of the kernels that were refused. The speedup is over the high-precision kernel, per
direction, and n/a where nothing was timed (emulation).
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from rich.markup import escape
from rich.table import Table

from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.passes.records import Note
from loka_compile.passes.records import PassRecord
from loka_compile.report.collect import GraphReport

WIDTH = 110
LEGEND = (
    "error: clamped MERE, worst of the FP8 directions, else of the refused kernels; "
    "speedup: over high precision"
)
HEADER = ("name", "M", "K", "N", *DIRECTIONS, "error", "speedup")
_NUMBERS = (1, 2, 3, 7, 8)
_KERNELS = (4, 5, 6)
_GAP = 2


def choices(site: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Direction -> choice, of the directions that the site has."""
    found = {d: site["directions"].get(d) for d in DIRECTIONS}
    return {d: c for d, c in found.items() if c}


def is_fp8(choice: Mapping[str, Any]) -> bool:
    return choice.get("kernel", HIGH_PRECISION) != HIGH_PRECISION


def has_fp8(site: Mapping[str, Any]) -> bool:
    """Does some direction of this site run in FP8."""
    return any(map(is_fp8, choices(site).values()))


def short(kernel: str) -> str:
    return "high" if kernel == HIGH_PRECISION else kernel.removesuffix(EMULATED)


def error_of(site: Mapping[str, Any]) -> float | None:
    kept = [c for c in choices(site).values() if is_fp8(c) or not has_fp8(site)]
    found = [c["mere_clamped"] for c in kept if c.get("mere_clamped") is not None]
    # NaN compares false with everything: without the key the order would decide.
    return max(found, key=lambda v: math.inf if math.isnan(v) else v) if found else None


def reasons_of(site: Mapping[str, Any]) -> list[str]:
    """Why directions stay in high precision, equal reasons once: `dgrad, wgrad: ...`."""
    kept = {d: c for d, c in choices(site).items() if not is_fp8(c)}
    return _by_reason({d: " ".join(str(c.get("reason") or "").split()) for d, c in kept.items()})


def pays_of(site: Mapping[str, Any]) -> list[str]:
    """From which batch on the chosen FP8 kernels pay, as `pays_from` put it in their reason."""
    found = {}
    for direction, choice in choices(site).items():
        said = re.search(r"FP8 pays [^;]+", str(choice.get("reason") or ""))
        if is_fp8(choice) and said is not None:
            found[direction] = said[0]
    return _by_reason(found)


def _by_reason(reasons: Mapping[str, str]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for direction, reason in reasons.items():
        if reason:
            by_reason.setdefault(reason, []).append(direction)
    if len(by_reason) == 1 and len(next(iter(by_reason.values()))) == len(DIRECTIONS):
        return list(by_reason)
    return [f"{', '.join(directions)}: {reason}" for reason, directions in by_reason.items()]


def _cells(site: Mapping[str, Any]) -> tuple[str, ...]:
    found = choices(site)
    count = site.get("count") or 1
    error = error_of(site)
    return (
        site["name"] + (f" x{count}" if count > 1 else ""),
        *(str(site[key]) for key in ("M", "K", "N")),
        *(short(found[d].get("kernel", HIGH_PRECISION)) if d in found else "-" for d in DIRECTIONS),
        "-" if error is None else f"{error:.3f}",
        speedup_text(found),
    )


def speedup_text(found: Mapping[str, Mapping[str, Any]]) -> str:
    values = {d: c.get("speedup") if is_fp8(c) else None for d, c in found.items()}
    if all(v is None for v in values.values()):
        return "n/a"
    shown = (values.get(d) for d in DIRECTIONS)
    return "/".join("-" if v is None else f"{v:.2f}" for v in shown)


def site_table(sites: Sequence[Mapping[str, Any]]) -> Table:
    """For a terminal: one row per GEMM site, its reasons in the last column."""
    table = Table(title="GEMM sites: (M, K) x (K, N)", title_justify="left", caption=LEGEND)
    for index, name in enumerate(HEADER):
        number = index in _NUMBERS
        table.add_column(
            name, justify="right" if number else "left", no_wrap=number, overflow="fold"
        )
    table.add_column("why high", overflow="fold", min_width=16)
    for site in sites:
        cells = [escape(c) for c in _cells(site)]
        for index, direction in zip(_KERNELS, DIRECTIONS, strict=True):
            if is_fp8(choices(site).get(direction, {})):
                cells[index] = f"[green]{cells[index]}[/]"
        table.add_row(*cells, escape("; ".join(reasons_of(site) + pays_of(site))))
    return table


def site_lines(sites: Sequence[Mapping[str, Any]]) -> list[str]:
    """Plain text, aligned, no line over WIDTH columns; reasons stand below their site."""
    rows = [HEADER, *map(_cells, sites)]
    widths = _widths(rows)
    lines = []
    for index, row in enumerate(rows):
        folded = [_fold(cell, width) for cell, width in zip(row, widths, strict=True)]
        for parts in zip_longest(*folded, fillvalue=""):
            padded = (
                part.rjust(width) if i in _NUMBERS else part.ljust(width)
                for i, (part, width) in enumerate(zip(parts, widths, strict=True))
            )
            lines.append((" " * _GAP).join(padded).rstrip())
        if index:
            said = [("    high: ", reason) for reason in reasons_of(sites[index - 1])]
            said += [("    fp8:  ", reason) for reason in pays_of(sites[index - 1])]
            for head, reason in said:
                lines += textwrap.wrap(
                    reason, WIDTH, initial_indent=head, subsequent_indent=" " * 10
                )
    return lines


def _widths(rows: Sequence[tuple[str, ...]]) -> list[int]:
    """Numbers as wide as they are; kernels and names fold when the line would be too long."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    room = WIDTH - _GAP * (len(HEADER) - 1) - sum(widths[i] for i in _NUMBERS)
    for i in _KERNELS:
        widths[i] = min(widths[i], max((room - min(widths[0], 20)) // len(_KERNELS), 9))
    widths[0] = min(widths[0], max(room - sum(widths[i] for i in _KERNELS), 8))
    return widths


def _fold(text: str, width: int) -> list[str]:
    """Lines of at most `width`, broken behind `:`, `.`, `_` where that is possible."""
    lines = [""]
    for piece in re.findall(r"[^:._]*[:._]|[^:._]+", text):
        if len(lines[-1]) + len(piece) > width and lines[-1]:
            lines.append("")
        while len(piece) > width:
            lines[-1] = piece[:width]
            piece = piece[width:]
            lines.append("")
        lines[-1] += piece
    return lines


def merge_sites(graphs: Iterable[GraphReport]) -> list[dict[str, Any]]:
    """Rows of all graphs by name and width, each once: training before no-grad, decided before not.

    A training graph knows all three directions; the no-grad graph of the same model only repeats
    what was decided there.
    """
    best: dict[tuple[str, int, int], tuple[tuple[bool, bool], dict[str, Any]]] = {}
    for graph in graphs:
        for site in graph.sites:
            key = (site["name"], site["K"], site["N"])
            rank = (graph.label.startswith("training"), _decided(site))
            if key not in best or rank >= best[key][0]:
                best[key] = (rank, site)
    return [site for _, site in best.values()]


def _decided(site: Mapping[str, Any]) -> bool:
    found = choices(site).values()
    return any(c.get("source") or c.get("mere_clamped") is not None for c in found)


def coverage(sites: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`linears`, `fused`, `fp8` (in some direction), `high_precision`, and its `reasons`."""
    reasons: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for site in sites:
        count = site.get("count") or 1
        totals["linears"] += count
        totals["fused"] += count if site.get("fused") else 0
        if has_fp8(site):
            totals["fp8"] += count
            continue
        totals["high_precision"] += count
        kinds = (_kind(str(c.get("reason") or "")) for c in choices(site).values())
        reasons["; ".join(dict.fromkeys(filter(None, kinds))) or "no reason recorded"] += count
    keys = ("linears", "fused", "fp8", "high_precision")
    return {**{key: totals[key] for key in keys}, "reasons": dict(reasons.most_common())}


def _kind(reason: str) -> str:
    """Reasons with measured numbers in them (see `lowering.gate`) count as one kind each."""
    if re.search(r"\bMERE [^ ]+ >=|rows off by|non-finite results", reason):
        return "not accurate enough"
    if re.search(r"\bspeedup [^ ]+ <", reason):
        return "not fast enough"
    return " ".join(reason.split())


def coverage_line(sites: Sequence[Mapping[str, Any]]) -> str:
    found = coverage(sites)
    listed = ", ".join(f"{n} x {reason}" for reason, n in found["reasons"].items())
    return (
        f"coverage: {found['linears']} linears found, {found['fused']} fused, {found['fp8']} with "
        f"FP8 in some direction, {found['high_precision']} in high precision"
        + (f" ({listed})" if listed else "")
    )


def note_lines(notes: Iterable[tuple[Note, int]], most: int = 6) -> list[str]:
    """One line per kind: its total, and the first few layers."""
    kinds: dict[str, Counter[str]] = {}
    for note, n in notes:
        kinds.setdefault(note.what, Counter())[note.where] += n
    lines = []
    for what, layers in kinds.items():
        shown = [w + (f" x{n}" if n > 1 else "") for w, n in layers.items()]
        more = ["..."] if len(shown) > most else []
        lines.append(f"{what}: {sum(layers.values())} ({', '.join(shown[:most] + more)})")
    return lines


def pass_lines(records: Sequence[PassRecord]) -> Iterator[str]:
    width = max([4, *(len(r.name) for r in records)])
    yield f"{'pass':<{width}}  {'ms':>8}  {'matches':>7}  {'refused':>7}  {'nodes':>12}"
    for r in records:
        counts = f"{r.ms:>8.2f}  {r.matches:>7}  {len(r.refusals):>7}"
        nodes = f"{r.nodes_before} -> {r.nodes_after}"
        yield f"{r.name:<{width}}  {counts}  {nodes:>12}" + ("  failed, undone" if r.error else "")


def say_failed(record: PassRecord) -> str:
    return f"pass {record.name} failed and was undone: {record.error.strip().splitlines()[-1]}"
