"""A study's result as a table for the terminal and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

QUESTIONS = (
    ("precision question", None),
    ("modelling question", "modelling"),
    ("A/A control", "aa_control"),
)


def pairings(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(title, pairing) of everything that was paired, in reading order."""
    found = []
    for title, key in QUESTIONS:
        pairing = result if key is None else result.get(key)
        if pairing and pairing.get("pairs"):
            found.append((title, pairing))
    for arm, pairing in (result.get("against_original") or {}).items():
        if pairing:
            found.append((f"{arm} against the original", pairing))
    return found


def show(console: Console, result: dict[str, Any]) -> None:
    data = result["data"]
    made = "[bold yellow]SYNTHETIC[/] " if data["synthetic"] else ""
    console.print(f"\n[bold]data[/] {made}{escape(data['source'])}, {data['rows']:,} rows")
    console.print(_arms(result))
    console.print(_questions(result))
    share = result["fp8_share"]
    for name, one in ({"loka": share} if "steps" in share else share).items():
        console.print(
            f"[bold]FP8 share[/] {name}: {100 * one['steps']:.1f} % of steps, "
            f"{100 * one['flops']:.1f} % of the linear layers' FLOPs"
        )
    for name, lost in result.get("given_up", {}).items():
        console.print(
            f"[red]{name} gave FP8 up at run time[/] in so many directions: {len(lost)}, which "
            f"its share leaves out; the first: {escape(lost[0])}",
            soft_wrap=True,
        )
    for of, one in (("", result), (" for the expected loss", result.get("expected"))):
        told = None if one is None else one["verdict"]
        if told is not None and told["passes"] is not None:
            word = "[green]within[/]" if told["passes"] else "[red]not within[/]"
            console.print(f"[bold]target[/]{of} {word}: {told['why']}")
    if result["env"]["emulated"]:
        console.print("[yellow]FP8 arithmetic is emulated here: quality, not speed.[/]")
    for what in ("missing", "faults"):
        for line in result.get(what, [])[:10]:
            console.print(f"[red]{what}[/]: {escape(line)}", soft_wrap=True)


def _arms(result: dict[str, Any]) -> Table:
    first = result["config"]["eval_from"]
    table = Table(title=f"arms, means over seeds, rows {first:,} on", title_justify="left")
    for column in ("arm", "seeds", "log loss", "NE", "AUC", "calibration", "not finite"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for name, arm in result["arms"].items():
        numbers = [arm[k] for k in ("log_loss", "ne", "auc", "calibration")]
        shown = ["-" if v is None else f"{v:.5f}" for v in numbers]
        table.add_row(name, str(arm["seeds"]), *shown, str(arm["non_finite"]))
    return table


def _questions(result: dict[str, Any]) -> Table:
    table = Table(
        title="RLL in percent, paired by seed (positive is worse)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for column in ("question", "pairs", "mean", "95 % interval", "sd", "worst window's bound"):
        table.add_column(column, justify="left" if column == "question" else "right")
    for title, pairing in pairings(result):
        for name, one in (("", pairing), (" (expected loss)", pairing.get("expected"))):
            if one is None:
                continue
            worst = max((w for w in one["window_upper95"] if w is not None), default=None)
            ci = one["ci95"]
            table.add_row(
                f"{title}{name}: {pairing['variant']} - {pairing['base']}",
                str(len(pairing["pairs"]) - one["without_figure"]),
                _signed(one["mean"]),
                "-" if ci is None else f"{_signed(ci[0])} .. {_signed(ci[1])}",
                "-" if one["sd"] is None else f"{one['sd']:.4f}",
                _signed(worst),
            )
    return table


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.4f}"


def draw(result: dict[str, Any], beside: Path) -> str:
    """RLL over the run, one panel per question, into ``beside`` with the suffix .svg."""
    try:
        import matplotlib
    except ImportError:
        return "none, matplotlib is not installed (pip install 'loka-compile[train]')"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    from loka_compile.files import replacing
    from loka_compile.train.pairs import interval

    found = pairings(result)
    figure, axes = pyplot.subplots(
        1, max(1, len(found)), figsize=(4.2 * max(1, len(found)), 3.2), squeeze=False
    )
    for axis, (title, pairing) in zip(axes[0], found, strict=False):
        key = "expected_rll_percent" if "expected" in pairing else "rll_percent"
        ends = [w["end"] / 1000 for w in pairing["pairs"][0]["windows"]]
        for pair in pairing["pairs"]:
            values = [w[key] for w in pair["windows"]]
            axis.plot(ends, _gaps(values), color="0.75", linewidth=0.7)
        columns = list(
            zip(*([w[key] for w in p["windows"]] for p in pairing["pairs"]), strict=True)
        )
        known = [[v for v in column if v is not None] for column in columns]
        means = [sum(k) / len(k) if k else float("nan") for k in known]
        bounds = [interval(k) or (m, m) for k, m in zip(known, means, strict=True)]
        axis.plot(ends, means, color="C0", linewidth=1.8)
        axis.fill_between(ends, [b[0] for b in bounds], [b[1] for b in bounds], alpha=0.25)
        axis.axhline(0.0, color="black", linewidth=0.6)
        axis.set_title(f"{title}\n{pairing['variant']} - {pairing['base']}", fontsize=9)
        axis.set_xlabel("thousand rows")
        axis.set_ylabel("RLL, % (positive is worse)")
    source = result["data"]
    note = f"{source['source']}{' (SYNTHETIC)' if source['synthetic'] else ''}, "
    note += f"{result['config']['model']} {result['config']['scale']}"
    figure.suptitle(note, fontsize=9)
    figure.tight_layout()
    target = beside.with_suffix(".svg")
    # A fixed salt and no date: the same figures give the same file.
    with replacing(target) as temporary, matplotlib.rc_context({"svg.hashsalt": "loka"}):
        figure.savefig(temporary, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return str(target)


def _gaps(values: list[float | None]) -> list[float]:
    return [float("nan") if v is None else v for v in values]
