r"""Table V: a scale bug in a kernel, seen by the plain MERE on random and on learned inputs.

    python benchmarks/paper/table5.py --data DIR --out benchmarks/results/table5.json

The fault is planted, and of our choosing: the scales that dequantise are floored at 1e-3 ("for
safety"), those that quantise are not. Standard normal operands have scales near 8e-3 and never meet
the floor; trained weights are ten to a hundred times smaller and do. 27 linears of models trained
on KuaiRand; the correct kernel is FP8 on the device, or emulated; the faulty one is emulated.
The paper, for its own production model and a faulty library benchmark: 0.42 against 0.42 on normal
inputs, 17.04 against 0.37 on learned ones (47 times).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from loka_compile.kernels.quantize import FP8_MAX
from loka_compile.kernels.quantize import round_to_fp8
from loka_compile.lowering import gemm
from loka_compile.lowering.recipes import EMULATED
from loka_compile.probe import quantify as qt
from paper import trained as tr

KERNEL = "torch:rowwise"
E4M3 = torch.float8_e4m3fn
FLOOR = 1e-3


def faulty(x: Tensor, w: Tensor) -> Tensor:
    """Row-scaled x @ w.T whose dequantising scales have a floor that the quantising ones lack."""

    def quantised(t: Tensor) -> Tensor:
        scale = t.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / FP8_MAX[E4M3]
        return round_to_fp8(t.float() / scale, E4M3) * scale.clamp(min=FLOOR)

    return (quantised(x) @ quantised(w).t()).to(x.dtype)


def mere(out: Tensor, ref: Tensor) -> float:
    """Mean |out - ref| / |ref| over the elements whose reference is not exactly zero."""
    out, ref = out.double(), ref.double()
    live = ref != 0
    return float(((out - ref).abs()[live] / ref.abs()[live]).mean())


def study(site: tr.Site, samples: int, model: str, kernel: str) -> dict[str, float]:
    x, gy = tr.statistics_of(site, list(range(len(site.x))))
    dtype = site.x[0].dtype
    w = site.w.to(dtype)
    bad, good = [], []
    for sample in qt.draw(x, gy, dtype, samples, model=model):
        weight = torch.randn_like(w) if model == "standard_normal" else w
        ref = sample.x.float() @ weight.float().t()
        good.append(mere(gemm.forward(sample.x, weight, kernel), ref))
        bad.append(mere(faulty(sample.x, weight), ref))
    return {"correct": sum(good) / len(good), "faulty": sum(bad) / len(bad)}


def geometric(values: list[float]) -> float:
    return math.exp(sum(math.log(v) for v in values if v > 0) / max(len(values), 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", default="tiny")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    device = torch.device(args.device)
    kernel = KERNEL if device.type == "cuda" else KERNEL + EMULATED
    rows: list[dict[str, Any]] = []
    for kind, counts in tr.CASES:
        if len(rows) >= 27:
            break
        one = tr.train(kind, counts, args.scale, args.data, args.steps, 8)
        for site in tr.record(one, one.later):
            if len(rows) >= 27:
                break
            moved = tr.Site(
                site.name,
                site.w.to(device),
                [t.to(device) for t in site.x],
                [t.to(device) for t in site.gy],
            )
            normal = study(moved, args.samples, "standard_normal", kernel)
            learned = study(moved, args.samples, "reservoir", kernel)
            rows.append(
                {"model": one.name, "site": site.name, "normal": normal, "learned": learned}
            )
    table = {
        which: {kind: geometric([r[which][kind] for r in rows]) for kind in ("faulty", "correct")}
        for which in ("normal", "learned")
    }
    result = {
        "env": tr.environment(args.device),
        "config": {k: str(v) for k, v in vars(args).items() if k not in ("data", "out")},
        "linears": len(rows),
        "table": table,
        "ratio_normal": table["normal"]["faulty"] / table["normal"]["correct"],
        "ratio_learned": table["learned"]["faulty"] / table["learned"]["correct"],
        "ratio_learned_largest": max(
            r["learned"]["faulty"] / r["learned"]["correct"] for r in rows
        ),
        "paper": {
            "normal": {"faulty": 0.42, "correct": 0.42},
            "learned": {"faulty": 17.04, "correct": 0.37},
        },
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1))


if __name__ == "__main__":
    main()
