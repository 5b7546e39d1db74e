"""The section of docs/results.md on what probing costs; empty without its file."""

from __future__ import annotations

from typing import Any

from results_page import read
from results_page import table
from results_page import where


def _dense(data: dict[str, Any]) -> list[str]:
    """More probed steps than the schedule has in the same time."""
    dense = data.get("dense")
    if dense is None:
        return []
    extra = dense["extra_ms_of_probed"]
    return [
        f"Of {dense['probed_steps']} probed steps in close order each took {extra['mean']:.1f} ms"
        f" more in the mean, {extra['median']:.1f} in the median:",
        f"{dense['overhead_percent']:.2f} % where one in {data['config']['every']} is probed.",
    ]


def overhead() -> list[str]:
    data = read("probe_overhead_h200.json")
    if data is None:
        return []
    extra = data["extra_ms_of_probed"]
    runs = ", ".join(f"{r:+.1f}" for r in data["runs_percent"])
    kernels, device = data["kernels"], data["device_us"]
    names = {
        "plain": "plain, `probe_every=0`",
        "probing_plain_step": f"plain, `probe_every={data['config']['every']}`",
        "probed_step": "probed",
    }
    return [
        "## What probing costs",
        "",
        f"`benchmarks/bench_probe_overhead.py`; {where(data['env'])}. Wukong"
        f" {data['config']['scale']}, batch {data['config']['batch']},",
        f"bf16, default mode; {data['fp8_directions']} FP8 directions at {data['sites']} sites."
        f" Over {data['steps'] * data['pairs']:,} steps with probing,",
        f"{data['probed_steps']} of them probed, these took"
        f" **{data['overhead_percent']:.2f} %** more than the plain steps around them",
        f"would have (the paper: 1 %): {extra['mean']:.1f} ms each in the mean,"
        f" {extra['median']:.1f} in the median, beside",
        f"{data['plain_ms_with_probing']:.1f} ms of a plain step. Wall time with probing over"
        f" wall time without, pair by pair,",
        f"differs by {runs} %: what else the host does is more than that.",
        *_dense(data),
        "",
        *table(
            ["step", "device kernels", "device time, ms"],
            [[names[n], f"{kernels[n]:,.0f}", f"{device[n] / 1e3:.2f}"] for n in names],
        ),
        "",
    ]
