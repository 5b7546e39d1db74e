"""Sections of docs/results.md about Dispatch: its choices, their prices, what making them takes."""

from __future__ import annotations

from typing import Any

from results_page import read
from results_page import table
from results_page import where

#: Not a rival: the model without the Mods, and Dispatch itself.
_BASELINES = ("bf16_original",)


def against_uniform() -> list[str]:
    """Dispatch beside the best of BF16-with-Mods and every uniform recipe, per setting."""
    data = read("dispatch_h200.json")
    if data is None:
        return []
    settings: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in data["rows"]:
        if row.get("ms") is not None:
            key = (row["scale"], row["batch"], row["params"], row["mode"], row["cuda_graphs"])
            settings.setdefault(key, {})[row["arm"]] = row
    rows = []
    for (scale, batch, params, mode, graphs), arms in sorted(settings.items()):
        chosen = [row for arm, row in arms.items() if arm.partition(":")[0] == "dispatch"]
        others = [
            row
            for arm, row in arms.items()
            if row not in chosen and arm not in _BASELINES and not arm.startswith("chain:")
        ]
        if not chosen or not others:
            continue
        best, other = (min(found, key=lambda row: row["ms"]) for found in (chosen, others))
        rows.append(
            [
                f"{scale}, {batch}, {params}", mode, "yes" if graphs else "no", _ms(best),
                other["arm"], _ms(other), f"{100 * (best['ms'] / other['ms'] - 1):+.1f} %",
            ]
        )  # fmt: skip
    if not rows:
        return []
    header = ["scale, batch, parameters", "mode", "CUDA graphs", "dispatch ms", "best other", "ms"]
    return [
        "### Dispatch against the best uniform choice",
        "",
        "The best of BF16 with Mods and one kernel for every GEMM, in the same setting. In",
        "brackets the milliseconds after which the host has started all of a step: where that is",
        "the whole step, the host is the limit, and what one process finds there is not what the",
        "next one finds. Of several processes (*n*) the median stands, and the least and the most.",
        "",
        *table([*header, "dispatch takes"], rows),
        "",
    ]


def _ms(row: dict[str, Any]) -> str:
    each = row.get("each_ms", [])
    spread = f", {min(each):.2f} to {max(each):.2f}, n = {len(each)}" if each else ""
    host = f" ({row['host_ms']:.2f}{spread})" if "host_ms" in row else ""
    return f"{row['ms']:.2f}{host}"


def pricing() -> list[str]:
    data = read("pricing_h200.json")
    if data is None:
        return []
    rows = [
        [
            f"{r['M']},{r['K']},{r['N']}",
            " / ".join(k.replace("high_precision", "high") for k in r["kernels"]),
            f"{r['measured_us']:.1f}",
            f"{r['priced_us']:.1f}",
            f"{100 * (r['priced_us'] / r['measured_us'] - 1):+.0f} %",
        ]
        for r in data["rows"]
    ]
    return [
        "## Prices of parts against whole sites",
        "",
        f"`benchmarks/bench_pricing.py`; {where(data['env'])}. Linear -> BlockNorm -> Hard Swish,",
        "forward and backward, in microseconds: as measured, and as the sum of the parts that",
        f"Dispatch counts with. Median miss {data['median_off_percent']:.1f} %, worst",
        f"{data['worst_off_percent']:.1f} %. The combination that is cheapest by its price costs",
        f"{data['mean_regret_percent']:.1f} % more than the cheapest as measured, at most",
        f"{data['max_regret_percent']:.1f} %.",
        "",
        *table(["M,K,N", "forward / dgrad / wgrad", "measured", "priced", "off"], rows),
        "",
    ]


def estimator() -> list[str]:
    data = read("estimator.json")
    if data is None or data["mean_regret_percent"] is None:
        return []
    alone = data["kernels_alone"]
    rows = [
        [
            k["kernel"], k["direction"], k["shapes"], f"{k['median_error_percent']:.1f} %",
            f"{k['worst_error_percent']:.0f} %",
        ]
        for k in data["kernels"]
    ]  # fmt: skip
    return [
        "## Estimates of shapes that were not measured",
        "",
        f"`benchmarks/bench_estimator.py`; rows of {where(data['env'])}. Every shape is left out",
        f"once. Median error {data['median_error_percent']:.1f} %; the kernel with the least",
        f"estimate takes {data['mean_regret_percent']:.1f} % more than the fastest one on average,",
        f"at most {data['max_regret_percent']:.1f} %. For the kernels alone, on operands that are",
        f"quantised: {alone['median_error_percent']:.1f} %, {alone['mean_regret_percent']:.1f} %,",
        f"{alone['max_regret_percent']:.1f} %.",
        "",
        *table(["kernel", "direction", "shapes", "median error", "worst"], rows),
        "",
    ]


def regret() -> list[str]:
    data = read("dispatch_regret.json")
    if data is None:
        return []
    worst = sorted(data["cases"], key=lambda c: -c["regret_percent"])[:5]
    rows = [
        [
            f"{c['M']},{c['K']},{c['N']}", c["direction"], c["chosen"], c["best"],
            f"{c['regret_percent']:.1f} %",
        ]
        for c in worst
    ]  # fmt: skip
    return [
        "## Choices against an exhaustive oracle",
        "",
        f"`benchmarks/bench_regret.py`; {where(data['env'])}. Choices by the times of one run,",
        f"judged by those of another: {data['mean_percent']:.2f} % on average over",
        f"{data['cases_compared']} shapes and directions, at most {data['max_percent']:.1f} %",
        f"({data['without_bar_mean_percent']:.2f} % without the bar of {data['min_speedup']:g} for",
        "leaving high precision). The worst:",
        "",
        *table(["M,K,N", "direction", "chosen", "fastest", "regret"], rows),
        "",
    ]
