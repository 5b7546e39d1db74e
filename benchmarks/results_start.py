"""Sections of docs/results.md about what comes before the first fast step: start-up and plans."""

from __future__ import annotations

from typing import Any

from results_page import read
from results_page import table
from results_page import where


def startup() -> list[str]:
    """Of a CPU, where most of it is ours to answer for, and of a GPU."""
    found = [data for name in ("startup.json", "startup_h200.json") if (data := read(name))]
    if not found:
        return []
    lines = ["## Start-up and compilation", ""]
    for data in found:
        lines += [f"`benchmarks/bench_startup.py`; {where(data['env'])}.", ""]
        lines += [*table(["what", "measured"], _startup_rows(data)), ""]
    return lines


def _startup_rows(data: dict[str, Any]) -> list[list[Any]]:
    rows: list[list[Any]] = []
    if "startup" in data:
        s = data["startup"]
        rows += [
            [f"first step of {s['linears']} linears, warm cache, plain Inductor",
             f"{s['plain']['wall_s']:.2f} s"],
            ["the same, backend loka with a pinned plan", f"{s['loka']['wall_s']:.2f} s"],
            [f"loka over plain, median of {s['pairs']} pairs", f"{s['ratio']:.2f}x"],
            ["the same in CPU time", f"{s['ratio_cpu']:.2f}x"],
            ["the same of the whole process, imports and all", f"{s['process_ratio']:.2f}x"],
        ]  # fmt: skip
    if "passes" in data:
        p = data["passes"]
        rows.append([f"our work on a graph of {p['linears']} linears", f"{p['seconds']:.2f} s"])
    if "recompiles" in data:
        r = data["recompiles"]
        rows.append([f"Dynamo graphs over {r['batch_sizes']} batch sizes", r["graphs"]])
    return rows


def plans() -> list[str]:
    """What one training step waits for while its plan is made."""
    found = [data for name in ("plan_h200.json", "plan_300_h200.json") if (data := read(name))]
    if not found:
        return []
    rows = []
    for data in found:
        for when, cache in (("cold", "empty"), ("warm", "of the first")):
            one = data[when]
            seconds: dict[str, float] = {}
            for plan in one["plans"]:
                for phase, s in plan["seconds"].items():
                    seconds[phase] = seconds.get(phase, 0.0) + s
            total = seconds.pop("plan", 0.0)
            phases = ", ".join(f"{phase} {s:.1f}" for phase, s in seconds.items() if s >= 0.05)
            rows.append(
                [
                    f"{data['model']}, {data['batch']}, {data['dtype']}", one["sites"],
                    one["shapes"], cache, f"{total:.1f} s", phases,
                ]
            )  # fmt: skip
    return [
        "## Making a plan",
        "",
        f"`benchmarks/bench_plan.py`; {where(found[0]['env'])}. Eight probed steps, then the",
        "one that waits for the plan; with an empty cache of the user's, and with what that left.",
        "",
        *table(["model, batch", "sites", "shapes", "cache", "plan", "of which, seconds"], rows),
        "",
    ]
