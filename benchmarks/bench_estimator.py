"""How well the estimator predicts shapes that it has not seen, and what its choices cost.

    python benchmarks/bench_estimator.py --gemm benchmarks/results/gemm_h200.json \
        --out benchmarks/results/estimator.json

Leave one shape out: every kernel's fit, the choice of its forms included, sees all shapes but one
and predicts that one. Regret: the true time of the kernel with the least predicted time, over the
least true time, per shape and direction. Both for whole directions, operands quantised on the way,
and for the kernels alone, which plans are priced by. Runs anywhere; no GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from loka_compile import _compat
from loka_compile.files import write_text
from loka_compile.lowering import estimator
from loka_compile.lowering.cost_import import rows_of_benchmark
from loka_compile.lowering.cost_table import CostRow

Shape = tuple[int, int, int]


def shape_of(row: CostRow) -> Shape:
    return row.key.m, row.key.k, row.key.n


def predictions(rows: list[CostRow]) -> dict[Shape, float]:
    """Shape -> microseconds predicted without it, for the rows of one kernel and direction."""
    sms = _compat.multiprocessors(rows[0].key.device)
    found = {}
    for one in rows:
        rest = [r for r in rows if shape_of(r) != shape_of(one)]
        products = [estimator.product_of(r.key.direction, *shape_of(r)) for r in rest]
        fitted = estimator.fit(products, [r.us for r in rest], sms)
        if fitted is not None:
            product = estimator.product_of(one.key.direction, *shape_of(one))
            found[shape_of(one)] = fitted.predict(*product)
    return found


def evaluate(rows: list[CostRow]) -> dict[str, Any]:
    families: dict[tuple[str, str, str], list[CostRow]] = {}
    for row in rows:
        families.setdefault((row.key.kernel, row.key.direction, row.key.dtype), []).append(row)
    kernels = []
    table: dict[tuple[str, str, Shape], list[tuple[float, float, str]]] = {}
    every: list[float] = []
    for (kernel, direction, dtype), mine in sorted(families.items()):
        predicted = predictions(mine)
        errors = []
        for row in mine:
            if shape_of(row) in predicted:
                guess = predicted[shape_of(row)]
                errors.append(abs(guess / row.us - 1))
                case = (direction, dtype, shape_of(row))
                table.setdefault(case, []).append((guess, row.us, kernel))
        if errors:
            every += errors
            kernels.append(
                {
                    "kernel": kernel,
                    "direction": direction,
                    "dtype": dtype,
                    "shapes": len(errors),
                    "median_error_percent": 100 * float(np.median(errors)),
                    "worst_error_percent": 100 * max(errors),
                }
            )
    cases: list[dict[str, Any]] = []
    regrets: list[float] = []
    for (direction, _, (m, k, n)), found in sorted(table.items()):
        if len(found) > 1:
            _, us, kernel = min(found)
            oracle, best = min((true, name) for _, true, name in found)
            regrets.append(100 * (us / oracle - 1))
            cases.append(
                {"direction": direction, "M": m, "K": k, "N": n, "chosen": kernel, "best": best,
                 "regret_percent": regrets[-1]}
            )  # fmt: skip
    return {
        "median_error_percent": 100 * float(np.median(every)),
        # None until two kernels have rows enough at one shape.
        "mean_regret_percent": float(np.mean(regrets)) if regrets else None,
        "max_regret_percent": float(np.max(regrets)) if regrets else None,
        "kernels": kernels,
        "cases": cases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gemm", type=Path, required=True, help="the GEMM benchmark's JSON")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    env = json.loads(args.gemm.read_text())["env"]
    result = {"env": env, **evaluate(rows_of_benchmark(args.gemm))}
    alone = evaluate(rows_of_benchmark(args.gemm, kernels_alone=True))
    result["kernels_alone"] = {k: v for k, v in alone.items() if k != "cases"}
    write_text(args.out, json.dumps(result, indent=1) + "\n")
    for one in (result, result["kernels_alone"]):
        print({k: v for k, v in one.items() if k.endswith("_percent")})
        for kernel in one["kernels"]:
            print(kernel)


if __name__ == "__main__":
    main()
