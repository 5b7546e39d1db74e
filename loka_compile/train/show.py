"""A result as text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loka_compile.train.result import CompareResult
from loka_compile.train.share import DIRECTIONS
from loka_compile.train.share import given_up
from loka_compile.train.share import is_fp8

EMULATED = "FP8 arithmetic is emulated here: this shows quality and decisions, not speed."
NONE = "-"


def show_result(console: Console, result: CompareResult, saved: Path) -> None:
    """Everything a run found: sites, rewrites, quality, speed, share, files."""
    emulated = bool(result.env.get("emulated")) and "loka" in result.arms
    console.print(f"\n[bold]data[/] {escape(result.data['source'])}: {result.data['summary']}")
    if result.sites:
        console.print(site_table(result.sites, emulated))
        refused = refusals(result.sites)
        if refused:
            console.print("[bold]why not FP8[/]")
        for line in refused:
            console.print(f"  {escape(line)}", highlight=False)
    if result.changes:
        console.print("[bold]rewritten in the model[/]")
        for change in result.changes:
            console.print(f"  {escape(change)}", highlight=False)
    console.print(arm_table(result, emulated))
    _headline(console, result)
    if len(result.windows) > 1:
        console.print(window_table(result))
    if "loka" in result.arms:
        share = result.fp8_share
        console.print(
            f"[bold]FP8 share[/] {_percent(share['steps'])} of steps, "
            f"{_percent(share['flops'])} of the linear layers' FLOPs (all three directions)"
        )
    lost = given_up(result.sites)
    if lost:
        console.print(
            f"[red]FP8 given up at run time[/] in so many directions: {len(lost)}; the first: "
            f"{escape(lost[0])}",
            soft_wrap=True,
        )
    if emulated:
        console.print(f"[bold yellow]{EMULATED}[/]")
    for name, path in {**result.files, "result": str(saved)}.items():
        console.print(f"saved {name}: {path}", markup=False, highlight=False, soft_wrap=True)


def site_table(sites: Sequence[Mapping[str, Any]], emulated: bool) -> Table:
    """One line per GEMM site; error is the largest mere_clamped of its directions."""
    table = Table(
        title="GEMM sites", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column in ("site", "MxKxN", *DIRECTIONS, "error", "speedup"):
        right = column in ("MxKxN", "error", "speedup")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for site in sites:
        choices = {d: site["directions"].get(d) for d in DIRECTIONS}
        errors = [c["mere_clamped"] for c in choices.values() if c and c.get("mere_clamped")]
        count = site.get("count") or 1
        table.add_row(
            escape(site["name"]) + (f" x{count}" if count > 1 else ""),
            "x".join(str(site[k]) for k in ("M", "K", "N")),
            *(_kernel(c) for c in choices.values()),
            f"{max(errors):.3f}" if errors else NONE,
            "n/a" if emulated else _speedups(choices),
        )
    return table


def refusals(sites: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why directions stayed in high precision: "layers.0.mlp.0 fwd, wgrad: REASON" per site."""
    lines = []
    for site in sites:
        reasons = _reasons({d: site["directions"].get(d) for d in DIRECTIONS})
        lines += [f"{site['name']} {reason}" for reason in reasons]
    return lines


def _kernel(choice: Mapping[str, Any] | None) -> str:
    if not choice or not choice.get("kernel"):
        return NONE
    if not is_fp8(choice):
        return "high" if choice["kernel"] == "high_precision" else escape(str(choice["kernel"]))
    return f"[green]{escape(str(choice['kernel']))}[/]"


def _speedups(choices: Mapping[str, Mapping[str, Any] | None]) -> str:
    found = [c.get("speedup") if c else None for c in choices.values()]
    return "/".join(NONE if s is None else f"{s:.2f}" for s in found)


def _reasons(choices: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
    """Refusals, equal ones once: "fwd, wgrad: K = 55 is not a multiple of 16"."""
    by_reason: dict[str, list[str]] = {}
    for direction, choice in choices.items():
        if choice and choice["kernel"] == "high_precision" and choice.get("reason"):
            by_reason.setdefault(str(choice["reason"]), []).append(direction)
    return [f"{', '.join(d)}: {reason}" for reason, d in by_reason.items()]


def arm_table(result: CompareResult, emulated: bool) -> Table:
    first, last = result.headline_rows
    table = Table(title=f"arms, rows {first:,} to {last:,}", title_justify="left")
    for column in ("arm", "log loss", "NE", "AUC", "examples/s", "whole pass"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for name, arm in result.arms.items():
        speed = NONE if arm.examples_per_s is None else f"{arm.examples_per_s:,.0f}"
        if emulated and name == "loka":
            speed += " (emulation)"
        bad = f"{arm.non_finite:,} logits not finite" if arm.non_finite else None
        table.add_row(
            name,
            bad or _number(arm.log_loss, 5),
            _number(arm.ne, 4),
            _number(arm.auc, 4),
            speed,
            f"{arm.seconds:.0f} s",
        )
    table.caption = (
        "NE: log loss / entropy of the mean rate. examples/s: steady steps, compilation excluded."
    )
    return table


def _headline(console: Console, result: CompareResult) -> None:
    lines = (
        ("precision question", "loka against bf16_mods", "rll_percent", result.rll_percent),
        (
            "modelling question",
            "bf16_mods against original",
            "mods_vs_original_percent",
            result.mods_vs_original_percent,
        ),
    )
    for question, what, key, value in lines:
        if set(what.split(" against ")) <= set(result.arms):
            console.print(
                f"[bold]{question}[/] RLL of {what}: [bold]{_signed(value)}[/] "
                f"(whole range {_signed(result.whole_range.get(key))}; positive is worse)"
            )
    if "loka" in result.arms and result.rll_percent is None and "bf16_mods" in result.arms:
        console.print("no row ran under a plan, so there is no RLL: use more rows (--limit)")


def window_table(result: CompareResult) -> Table:
    table = Table(title="windows", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    headers = ["rows", "plan", "loka vs\nbf16_mods", "bf16_mods\nvs original"]
    for column in (*headers, *(f"NE\n{name}" for name in result.arms)):
        table.add_column(column, justify="right", no_wrap=True)
    for w in result.windows:
        table.add_row(
            f"{w.start:,}-{w.end:,}",
            "on" if w.plan_active else "off",
            _signed(w.rll_percent),
            _signed(w.mods_vs_original_percent),
            *(_number(w.ne[name], 4) for name in result.arms),
        )
    return table


def show_versions(console: Console, found: Mapping[str, Any]) -> None:
    for name, version in found.items():
        console.print(f"{name:<13} {version or 'not installed'}", markup=False, highlight=False)


def show_kernels(console: Console, kernels: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="kernels", title_justify="left")
    for column in ("library", "kernel", "runs here", "why not"):
        table.add_column(column, overflow="fold")
    for k in kernels:
        yes = "[green]yes[/]" if k["available"] else "no"
        reason = "" if k["available"] else str(k.get("reason") or "")
        table.add_row(escape(str(k["library"])), escape(str(k["kernel"])), yes, escape(reason))
    console.print(table)
    if not any(k["available"] and is_fp8(k) for k in kernels):
        console.print(
            "No FP8 kernel runs on this device; emulate=True shows quality without speed."
        )


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _signed(value: float | None) -> str:
    return NONE if value is None else f"{value:+.4f} %"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{100.0 * value:.1f} %"
