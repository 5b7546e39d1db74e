"""Write docs/results.md and its charts from the files under benchmarks/results/.

`make results` calls it.

    python benchmarks/make_results.py [--check]

--check: fail when the page is not what the files say (a test calls it).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable
from typing import Any

from results_budget import budget
from results_charts import FOLDER
from results_charts import charts
from results_charts import shown
from results_dispatch import against_uniform
from results_dispatch import estimator
from results_dispatch import pricing
from results_dispatch import regret
from results_headline import headline
from results_kernels import fused_backward
from results_kernels import gemms
from results_kernels import grouped_weights
from results_kernels import launches
from results_kernels import pointwise
from results_kernels import quantisers
from results_kernels import sanitizer
from results_kernels import whole_steps
from results_page import MODS
from results_page import PAGE
from results_page import README
from results_page import read
from results_page import table
from results_page import where
from results_page import with_section
from results_paper import bias_norms
from results_paper import block_sizes
from results_paper import each_mod
from results_paper import each_mod_table
from results_paper import latency
from results_paper import norm_blocks
from results_paper import quality
from results_paper import speed
from results_probe import overhead
from results_start import plans
from results_start import startup
from results_uniform import stress
from results_uniform import uniform_tail


def fused_forward() -> list[str]:
    data = read("fused_forward_h200.json")
    if data is None:
        return []
    lines = [
        "## One fused kernel: FP8 Linear -> BlockNorm -> Hard Swish",
        "",
        f"`benchmarks/bench_fused_forward.py`; {where(data['env'])}. Microseconds, medians under",
        "CUDA-graph replay. *fused*: e4m3 input with a static scale and quantised weights, as",
        "inside a chain; *dynamic*: bf16 input quantised inside the measured region; *train*:",
        "e4m3 output, its transposed copy, and the tensors that the backward needs; *blockwise*:",
        "scales per 1 x 128 of the input and 128 x 128 of the weight. Speedup: the better of the",
        "first two over compiled bf16 Linear(bias) + LayerNorm + SiLU.",
        "",
    ]
    columns = {
        "bf16 LN+SiLU": "bf16_layernorm_silu_us",
        "bf16 Mods": "bf16_mods_us",
        "fused": "fused_us",
        "fused, e4m3 out": "fused_fp8_out_us",
        "dynamic": "fused_dynamic_us",
        "train": "fused_train_us",
        "blockwise": "fused_blockwise_us",
        "no epilogue": "bare_fp8_us",
        "best library": "best_library_fp8_us",
    }
    rows = [
        [
            f"{r['M']},{r['K']},{r['N']}",
            # Files of before the blockwise form lack its column.
            *(f"{r[key]:.1f}" if key in r else "" for key in columns.values()),
            f"{r['speedup']:.2f}x",
        ]
        for r in data["rows"]
    ]
    lines += table(["M,K,N", *columns, "speedup"], rows)
    lines.append("")
    for m in dict.fromkeys(r["M"] for r in data["rows"]):
        mine = [r for r in data["rows"] if r["M"] == m]
        fused = statistics.geometric_mean(r["speedup"] for r in mine)
        dynamic = statistics.geometric_mean(
            r["bf16_layernorm_silu_us"] / r["fused_dynamic_us"] for r in mine
        )
        lines.append(
            f"Geometric means at M = {m}: fused {fused:.2f}x, dynamic {dynamic:.2f}x. Largest "
            f"relative error against FP64: {max(r['rel_error'] for r in mine):.4f}."
        )
    drawn = shown("figure_13", "Latency of a fused chain over bf16 LayerNorm and SiLU, by shape")
    return [*lines, "", *drawn, ""]


def training() -> list[str]:
    data = read("train_h200.json")
    if data is None:
        return []
    config = data["config"]
    fp8 = sum(c["kernel"] != "high_precision" for s in data["sites"] for c in _choices(s))
    total = sum(len(s["directions"]) for s in data["sites"])
    return [
        "## Training with real FP8 kernels",
        "",
        f"`benchmarks/bench_train_h200.py`; {where(data['env'])}. Wukong {config['scale']} on",
        f"KuaiRand, {config['steps']} steps of {config['batch']}, one seed, accuracy gate only.",
        "",
        *table(
            ["what", "measured"],
            [
                ["every loss finite", data["finite"]],
                ["loss of step 1 against the CPU's", f"{data['step1_vs_cpu_percent']:.4f} %"],
                [
                    "mean of the second half against BF16 with the same Mods",
                    f"{data['late_mean_vs_bf16_percent']:+.4f} %",
                ],
                ["directions in FP8", f"{fp8} of {total}"],
            ],
        ),
        "",
    ]


def _choices(site: dict[str, Any]) -> Iterable[dict[str, Any]]:
    return site["directions"].values()


def prediction() -> list[str]:
    data = read("probe_prediction.json")
    if data is None:
        return []
    rows = []
    for key, value in data["summary"].items():
        name, direction = key.rsplit(" ", 1)
        rows.append(
            [
                name,
                direction,
                value["cases"],
                f"{value['median_row_off_percent_median']:.1f} %",
                f"{value['median_row_off_percent_worst']:.1f} %",
                f"{value['bad_rows_off_points_median']:.2f}",
                f"{value['bad_rows_off_points_worst']:.2f}",
            ]
        )
    return [
        "## What the Probe predicts, against held-back real batches",
        "",
        f"`benchmarks/bench_probe_prediction.py`; {where(data['env'])}. Wukong and DCN-V2",
        f"trained {data['config']['steps']} steps on KuaiRand with raw and with log-scaled counts;",
        "every site that FP8 can take, tensorwise and rowwise. Miss of the median row's error in",
        "percent, of the share of bad rows in points.",
        "",
        *table(
            [
                "distribution",
                "direction",
                "cases",
                "median row, typical",
                "worst",
                "bad rows, typical",
                "worst",
            ],
            rows,
        ),
        "",
        *_wgrad_tries(data),
    ]


_TRIES = {
    "rows": "rows of many batches, each sample with one batch's coherence",
    "rows_all_batches": "the same rows, coherences of all recorded batches",
    "sketches": "columns of whole batches, those held",
    "sketches_coherence": "their noise, matched to all recorded coherences (the default)",
    "probed_truth": "the true error of the probed batches",
}


def _wgrad_tries(data: dict[str, Any]) -> list[str]:
    tries = data.get("wgrad_tries")
    if tries is None:
        return []
    rows = []
    for name, said in _TRIES.items():
        row = [said]
        for side in ("probed", "held_back"):
            one = tries[name][side]
            typical = one["median_row_off_percent_median"]
            worst = one["median_row_off_percent_worst"]
            row.append(f"{typical:.1f} % ({worst:.0f} %)")
            typical, worst = one["bad_rows_off_points_median"], one["bad_rows_off_points_worst"]
            row.append(f"{typical:.2f} ({worst:.1f})")
        row.append(_within(data["tries"], name))
        rows.append(row)
    return [
        "A wgrad sums over a batch, and its error differs from batch to batch:",
        f"{data['config']['batches']} batches were probed and as many held back. Ways to predict",
        "it, typical miss (worst in brackets); chosen on the probed batches, then looked at on the",
        "held-back ones. The last line is what the choice of batches alone makes of a perfect",
        "measurement.",
        "",
        *table(
            [
                "way",
                "probed: median row",
                "bad rows",
                "held back: median row",
                "bad rows",
                "within 15 % and 5 points",
            ],
            rows,
        ),
        "",
    ]


def _within(tries: list[dict[str, Any]], name: str) -> str:
    """Held-back cases that this way predicts within 15 % of the median row and 5 points."""
    good = 0
    for one in tries:
        guess, true = one["tries"][name], one["held_back"]
        near = abs(guess["median_row"] - true["median_row"]) <= 0.15 * true["median_row"]
        good += near and abs(guess["bad_rows"] - true["bad_rows"]) <= 0.05
    return f"{good} of {len(tries)}"


def gpu_tests() -> list[str]:
    data = read("gpu_tests_h200.json")
    if data is None:
        return []
    total = data["total"]
    counts = ", ".join(f"{total[k]} {k}" for k in ("passed", "failed", "skipped") if k in total)
    return [
        "## The test suite's quick part on a GPU",
        "",
        f"`benchmarks/run_gpu_tests.py`; {where(data['env'])}: {counts}.",
        "",
        *(f"* failed: `{name}`" for name in data["failures"]),
        "",
    ]


def page() -> str:
    lines = [
        "# Results",
        "",
        "Generated by `make results` from the files under `benchmarks/results/`; do not edit.",
        "",
        *quality(),
        *stress(),
        *uniform_tail(),
        *block_sizes(),
        *norm_blocks(),
        *each_mod(),
        *bias_norms(),
        *speed(),
        *latency(),
        *training(),
        *whole_steps(),
        *against_uniform(),
        *regret(),
        *pricing(),
        *estimator(),
        *startup(),
        *plans(),
        *fused_forward(),
        *pointwise(),
        *gemms(),
        *fused_backward(),
        *quantisers(),
        *grouped_weights(),
        *launches(),
        *overhead(),
        *prediction(),
        *budget(),
        *gpu_tests(),
        *sanitizer(),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    folder = PAGE.parent / FOLDER
    mods = with_section(MODS, "each-mod", each_mod_table())
    readme = with_section(README, "results", headline())
    drawn = {folder / name: text for name, text in charts().items()}
    files = {PAGE: page(), MODS: mods, README: readme, **drawn}
    if args.check:
        stale = [f.name for f, text in files.items() if not f.exists() or f.read_text() != text]
        if stale:
            print(f"{', '.join(stale)}: stale; run `make results`", file=sys.stderr)
        return 1 if stale else 0
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        if old not in files:
            old.unlink()
    for file, text in files.items():
        file.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
