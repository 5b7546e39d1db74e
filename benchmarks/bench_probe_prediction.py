r"""Does the Probe predict the error that real batches then see? Per site, recipe and model.

    python benchmarks/bench_probe_prediction.py --data DIR \
        --out benchmarks/results/probe_prediction.json

Models are trained on KuaiRand in high precision, with log-scaled and with raw counts; then inputs
and output gradients of every site are recorded on real batches. Every second batch is probed, as
late probes are spread over a run; the others, held back, give the true error of each kernel
(emulated FP8, real data, whole batch). Per row of the result: predicted and true median row error,
and share of rows off by more than 10 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from paper import trained as tr

from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import EMULATED
from loka_compile.probe import models
from loka_compile.probe.quantify import Sample
from loka_compile.probe.quantify import measure
from loka_compile.probe.quantify import quantify
from loka_compile.probe.quantify import run

KERNELS = ("torch:tensorwise", "torch:rowwise")


def truth(direction: str, kernel: str, site: tr.Site, batches: list[int]) -> dict[str, float]:
    """Mean over the held-back batches, each quantised as a whole."""
    w = site.w.to(site.x[0].dtype)
    zero = torch.zeros(())
    rows = [
        measure(*run(direction, Sample(site.x[i], site.gy[i], zero, zero), w, kernel))
        for i in batches
    ]
    return {key: sum(r[key] for r in rows) / len(rows) for key in ("median_row", "bad_rows")}


def study(case: tuple[str, str], args: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    probed = list(range(0, args.batches, 2))
    held_back = list(range(1, args.batches, 2))
    rows = []
    one = tr.train(*case, args.scale, args.data, args.steps, args.batches)
    for site in tr.record(one, one.later):
        x, gy = tr.statistics_of(site, probed)
        for direction in DIRECTIONS:
            for kernel in KERNELS:
                true = truth(direction, kernel + EMULATED, site, held_back)
                for name in models.MODELS:
                    got = quantify(
                        direction, kernel + EMULATED, site.w, x, gy, x.rows.dtype, model=name
                    )
                    rows.append(
                        {
                            "model": one.name,
                            "site": site.name,
                            "direction": direction,
                            "recipe": kernel,
                            "distribution": name,
                            "predicted_median_row": got.median_row,
                            "true_median_row": true["median_row"],
                            "predicted_bad_rows": got.bad_rows,
                            "true_bad_rows": true["bad_rows"],
                        }
                    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", default="tiny")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batches", type=int, default=48, help="recorded, every second is probed")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()

    with ProcessPoolExecutor(args.processes) as pool:
        found = list(pool.map(study, tr.CASES, [args] * len(tr.CASES)))
    rows = [row for one in found for row in one]
    summary = summarise(rows)
    result = {
        "env": tr.environment(),
        "config": {k: str(v) for k, v in vars(args).items() if k not in ("data", "out")},
        "summary": summary,
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Per distribution and direction: worst and median miss over sites and recipes."""
    found: dict[str, Any] = {}
    for name in models.MODELS:
        for direction in DIRECTIONS:
            mine = [r for r in rows if r["distribution"] == name and r["direction"] == direction]
            ratio = sorted(
                abs(r["predicted_median_row"] / r["true_median_row"] - 1)
                for r in mine
                if r["true_median_row"] > 0
            )
            points = sorted(abs(r["predicted_bad_rows"] - r["true_bad_rows"]) for r in mine)
            found[f"{name} {direction}"] = {
                "cases": len(mine),
                "median_row_off_percent_worst": 100 * ratio[-1],
                "median_row_off_percent_median": 100 * ratio[len(ratio) // 2],
                "bad_rows_off_points_worst": 100 * points[-1],
                "bad_rows_off_points_median": 100 * points[len(points) // 2],
            }
    return found


if __name__ == "__main__":
    main()
