r"""Does the Probe predict the error that real batches then see? Per site, recipe and model.

    python benchmarks/bench_probe_prediction.py --data DIR \
        --out benchmarks/results/probe_prediction.json

Models are trained on KuaiRand in high precision, with log-scaled and with raw counts. The batches
behind the training ones are split, every second one into a pool of its own: one pool is probed, the
other is held back and gives the true error of each kernel (emulated FP8, real data, whole batch).
After the first pass over a pool its rows are mixed anew, as a loader does between epochs. Per row
of the result: predicted and true median row error, and share of rows off by more than 10 %.

The error of a weight's gradient differs from batch to batch by half of itself or more, so both
sides want many batches. `wgrad_tries` compares ways to predict it (`wgrad_tries.py`): on the probed
batches themselves, by which the default was chosen, and on the held-back ones; `probed_truth` is
the true error of the probed batches, as a prediction the best that there is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from paper import trained as tr
from wgrad_tries import TRIES

from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import EMULATED
from loka_compile.probe import models
from loka_compile.probe.measures import BAD_ROW
from loka_compile.probe.measures import measure
from loka_compile.probe.quantify import Sample
from loka_compile.probe.quantify import quantify
from loka_compile.probe.quantify import run

KERNELS = ("torch:tensorwise", "torch:rowwise")
MEASURES = ("median_row", "bad_rows")
#: Held-back batches on which forward and dgrad are measured: their rows are many in one batch.
ROW_BATCHES = 32
CHOSEN_BY = (
    "smallest worst and median miss on the probed batches; the held-back ones were then looked at"
)


def draws(pool: list[Any], count: int, seed: int) -> Iterator[Any]:
    """`count` batches: the pool as it is, then its rows mixed anew for each pass."""
    yield from pool[:count]
    whole = [torch.cat(parts) for parts in zip(*(b.tensors() for b in pool), strict=True)]
    names = ("categorical", "dense", "label", "history", "truth")
    names = [n for n in names if getattr(pool[0], n) is not None]
    size, left = len(pool[0]), count - len(pool)
    generator = torch.Generator().manual_seed(seed)
    while left > 0:
        order = torch.randperm(whole[0].shape[0], generator=generator)
        for at in range(0, order.numel() - size + 1, size):
            pick = order[at : at + size]
            parts = {n: t[pick] for n, t in zip(names, whole, strict=True)}
            yield replace(pool[0], **parts)
            left -= 1
            if left == 0:
                return


def errors(direction: str, kernel: str, site: tr.Site) -> dict[str, float]:
    """Of the one batch that `site` holds, quantised as a whole."""
    zero = torch.zeros(())
    sample = Sample(site.x[0], site.gy[0], zero, zero)
    found = measure(*run(direction, sample, site.w.to(site.x[0].dtype), kernel + EMULATED))
    return {key: found[key] for key in MEASURES}


def mean(found: list[dict[str, float]]) -> dict[str, float]:
    return {key: sum(f[key] for f in found) / len(found) for key in MEASURES}


def study(case: tuple[str, str], args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    torch.set_num_threads(1)
    one = tr.train(*case, args.scale, args.data, args.steps, args.later)
    probed_truth, truth = defaultdict(list), defaultdict(list)
    for sites in tr.record_each(one, draws(one.later[0::2], args.batches, 1)):
        for site in sites:
            for kernel in KERNELS:
                found = errors("wgrad", kernel, site)
                probed_truth[site.name, kernel].append(found)
    states = tr.recorded_statistics(one)
    weights = {site.name: site.w for site in sites}
    held_back = tr.record_each(one, draws(one.later[1::2], args.batches, 2))
    for number, sites in enumerate(held_back):
        for site in sites:
            for direction in DIRECTIONS if number < ROW_BATCHES else ("wgrad",):
                for kernel in KERNELS:
                    found = errors(direction, kernel, site)
                    truth[site.name, direction, kernel].append(found)
    rows, tries = [], []
    for (name, direction, kernel), found in truth.items():
        true, (x, gy) = mean(found), states[name]
        about = {"model": one.name, "site": name, "recipe": kernel}
        for model in models.MODELS:
            w, dtype = weights[name], x.rows.dtype
            got = quantify(direction, kernel + EMULATED, w, x, gy, dtype, model=model)
            row = {**about, "direction": direction, "distribution": model}
            for key in MEASURES:
                row |= {f"predicted_{key}": getattr(got, key), f"true_{key}": true[key]}
            rows.append(row)
        if direction == "wgrad":
            seen = mean(probed_truth[name, kernel])
            guesses = {n: _of(t(kernel + EMULATED, x, gy, dtype)) for n, t in TRIES.items()}
            guesses["probed_truth"] = seen
            tries.append({**about, "probed": seen, "held_back": true, "tries": guesses})
    return {"rows": rows, "tries": tries}


def _of(found: torch.Tensor) -> dict[str, float]:
    medians = torch.nan_to_num(found.nanmedian(dim=1).values)
    bad = (found > BAD_ROW).double().mean(1)
    return {"median_row": float(medians.mean()), "bad_rows": float(bad.mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", default="tiny")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--later", type=int, default=234, help="batches behind the training ones")
    parser.add_argument("--batches", type=int, default=256, help="probed, and as many held back")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()

    with ProcessPoolExecutor(args.processes) as pool:
        found = list(pool.map(study, tr.CASES, [args] * len(tr.CASES)))
    rows = [row for one in found for row in one["rows"]]
    tries = [row for one in found for row in one["tries"]]
    summary = summarise(rows)
    result = {
        "env": tr.environment(),
        "config": {k: str(v) for k, v in vars(args).items() if k not in ("data", "out")},
        "summary": summary,
        "wgrad_tries": {"chosen_by": CHOSEN_BY, **compare(tries)},
        "rows": rows,
        "tries": tries,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: result[k] for k in ("summary", "wgrad_tries")}, indent=1))


def compare(tries: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in tries[0]["tries"]:
        found[name] = {
            side: misses(
                [(r["tries"][name]["median_row"], r[side]["median_row"]) for r in tries],
                [(r["tries"][name]["bad_rows"], r[side]["bad_rows"]) for r in tries],
            )
            for side in ("probed", "held_back")
        }
    return found


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Per distribution and direction: worst and median miss over sites and recipes."""
    found: dict[str, Any] = {}
    for name in models.MODELS:
        for direction in DIRECTIONS:
            mine = [r for r in rows if r["distribution"] == name and r["direction"] == direction]
            found[f"{name} {direction}"] = misses(
                [(r["predicted_median_row"], r["true_median_row"]) for r in mine],
                [(r["predicted_bad_rows"], r["true_bad_rows"]) for r in mine],
            )
    return found


def misses(
    medians: list[tuple[float, float]], shares: list[tuple[float, float]]
) -> dict[str, float]:
    """(predicted, true) of every case -> worst and median miss."""
    ratio = sorted(abs(p / t - 1) for p, t in medians if t > 0)
    points = sorted(abs(p - t) for p, t in shares)
    return {
        "cases": len(medians),
        "median_row_off_percent_worst": 100 * ratio[-1],
        "median_row_off_percent_median": 100 * ratio[len(ratio) // 2],
        "bad_rows_off_points_worst": 100 * points[-1],
        "bad_rows_off_points_median": 100 * points[len(points) // 2],
    }


if __name__ == "__main__":
    main()
