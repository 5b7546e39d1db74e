"""Sections of docs/results.md about the loss budget; each is empty without its file."""

from __future__ import annotations

from results_page import read
from results_page import table
from results_page import where


def budget() -> list[str]:
    data = read("budget_gate.json")
    if data is None:
        return []
    rows = [
        [
            r["model"],
            f"{r['budget']:g}",
            f"{r['fp8_forwards']} of {r['sites']}",
            f"{100 * r['fp8_flops_share']:.0f} %",
            "-" if r["predicted_nats"] is None else f"{r['predicted_nats']:.1e}",
            "-" if r["replayed_nats"] is None else f"{r['replayed_nats']:.1e}",
            f"{r['true_nats']:.1e}",
        ]
        for r in data["rows"]
    ]
    config = data["config"]
    return [
        "## What a loss budget buys",
        "",
        '`gate="budget"` from end to end, by `benchmarks/bench_budget_gate.py`;',
        f"{where(data['env'])}, FP8 emulated. Models trained for {config['steps']} steps of 512 on",
        f"KuaiRand ({config['counts']} counts). Nats per sample: predicted is the sum over sites,",
        "replayed is the whole assignment on the one batch of step 9, true is on "
        f"{data['rows'][0]['held_back_rows']:,}",
        f"held-back rows. {data['within_budget']} of {data['assignments']} assignments with FP8 in",
        "them keep their budget there.",
        "",
        *table(
            [
                "model",
                "budget",
                "forwards in FP8",
                "of the FLOPs",
                "predicted",
                "replayed",
                "true",
            ],
            rows,
        ),
        "",
    ]
