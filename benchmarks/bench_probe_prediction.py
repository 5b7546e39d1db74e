r"""Does the Probe predict the error that real batches then see? Per site, recipe and model.

    python benchmarks/bench_probe_prediction.py --data DIR \
        --out benchmarks/results/probe_prediction.json

A Wukong is trained on KuaiRand in high precision; then the inputs and output gradients of every
site are recorded on real batches. Statistics see the first batches only; the held-back ones give
the true error of each kernel (emulated FP8, real data, whole batch). Per row of the result:
predicted and true median row error, and share of rows off by more than 10 %.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import loka_compile
from loka_compile.data.registry import open_source
from loka_compile.ledger import model_entries
from loka_compile.lowering.recipes import EMULATED
from loka_compile.probe import models
from loka_compile.probe import statistics
from loka_compile.probe.quantify import Sample
from loka_compile.probe.quantify import measure
from loka_compile.probe.quantify import quantify
from loka_compile.probe.quantify import run
from loka_compile.probe.statistics import Statistics
from loka_compile.zoo.wukong import Wukong
from loka_compile.zoo.wukong import WukongConfig

KERNELS = ("torch:tensorwise", "torch:rowwise")
DIRECTIONS = ("fwd", "dgrad", "wgrad")


@contextmanager
def recorder() -> Iterator[dict[int, list[torch.Tensor]]]:
    """Whole observed batches, by the address of the state that they went into."""
    seen: dict[int, list[torch.Tensor]] = defaultdict(list)
    keep = statistics._keep_rows

    def keep_all(x: torch.Tensor, rows: torch.Tensor, scalars: torch.Tensor) -> None:
        seen[rows.data_ptr()].append(x.to(rows.dtype))
        keep(x, rows, scalars)

    statistics._keep_rows = keep_all
    try:
        yield seen
    finally:
        statistics._keep_rows = keep


def step(model: Wukong, dense: Any, batch: Any) -> torch.Tensor:
    embeddings = model.embedding(batch.categorical)
    with torch.autocast("cpu", torch.bfloat16):
        logits = dense(embeddings, batch.dense)
    return binary_cross_entropy_with_logits(logits.float(), batch.label)


def record(model: Wukong, batches: list[Any]) -> dict[str, tuple[torch.Tensor, Any, Any]]:
    """site -> (weight (N, K), inputs per batch, output gradients per batch)."""
    torch._dynamo.reset()
    options = {"mods": "on", "emulate": True, "inner": "eager"}
    dense = torch.compile(model.dense, backend="loka", options=options)
    with recorder() as seen:
        for batch in batches:
            step(model, dense, batch).backward()
    found = {}
    for _, entry in model_entries(model.dense):
        for (call, role), held in entry.statistics.items():
            if role != "x":
                continue
            gy = entry.statistics[(call, "g")]
            weight = entry.ref()
            xs = seen[held.rows.data_ptr()]
            gs = seen[gy.rows.data_ptr()]
            w = weight.detach()
            if w.shape[1] != xs[0].shape[1]:
                w = w.t()
            found[entry.name + (f"#{call}" if call else "")] = (w, xs, gs)
    return found


def statistics_of(batches: list[torch.Tensor]) -> Statistics:
    held = Statistics.empty(batches[0].shape[1], batches[0].dtype, torch.device("cpu"))
    for one in batches:
        torch.ops.loka.observe(one, *held.tensors)
    return held


def truth(direction: str, kernel: str, w: torch.Tensor, xs: Any, gs: Any) -> dict[str, float]:
    """Mean over the held-back batches, each quantised as a whole."""
    w = w.to(xs[0].dtype)
    zero = torch.zeros(())
    rows = [
        measure(*run(direction, Sample(x, g, zero, zero), w, kernel))
        for x, g in zip(xs, gs, strict=True)
    ]
    return {key: sum(r[key] for r in rows) / len(rows) for key in ("median_row", "bad_rows")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", default="tiny")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--held-back", type=int, default=3)
    args = parser.parse_args()

    source = open_source(f"kuairand:{args.data}")
    probed = 5 + args.held_back
    batches = list(source.batches(args.batch, limit=args.batch * (args.steps + probed)))
    torch.manual_seed(0)
    model = Wukong(
        WukongConfig.of(args.scale), source.schema.cardinalities, len(source.schema.dense)
    )
    trained = copy.deepcopy(model)
    loka_compile.apply_mods(trained.dense)
    optimizer = torch.optim.Adam(trained.parameters(), lr=1e-3)
    dense = torch.compile(trained.dense)
    for batch in batches[: args.steps]:
        optimizer.zero_grad(set_to_none=True)
        step(trained, dense, batch).backward()
        optimizer.step()
    model.load_state_dict(trained.state_dict(), strict=False)
    recorded = record(model, batches[args.steps :])

    rows = []
    for site, (w, xs, gs) in recorded.items():
        x, gy = statistics_of(xs[:5]), statistics_of(gs[:5])
        for direction in DIRECTIONS:
            for kernel in KERNELS:
                true = truth(direction, kernel + EMULATED, w, xs[5:], gs[5:])
                for name in models.MODELS:
                    got = quantify(direction, kernel + EMULATED, w, x, gy, xs[0].dtype, model=name)
                    rows.append(
                        {
                            "model": f"wukong-{args.scale}",
                            "site": site,
                            "direction": direction,
                            "recipe": kernel,
                            "distribution": name,
                            "predicted_median_row": got.median_row,
                            "true_median_row": true["median_row"],
                            "predicted_bad_rows": got.bad_rows,
                            "true_bad_rows": true["bad_rows"],
                        }
                    )
    summary = summarise(rows)
    result = {
        "env": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": "cpu, emulated FP8",
            "date": datetime.now(timezone.utc).date().isoformat(),
        },
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
