r"""What Dispatch's choices cost against an exhaustive oracle, table and oracle from different runs.

    python benchmarks/bench_gemm.py --out benchmarks/results/gemm_h200.json --fresh
    python benchmarks/bench_gemm.py --out /tmp/gemm_oracle.json --fresh --every 3 \
        --libraries high_precision torch fbgemm --budget-seconds 85
    python benchmarks/bench_regret.py --table benchmarks/results/gemm_h200.json \
        --oracle /tmp/gemm_oracle.json --out benchmarks/results/dispatch_regret.json

Per shape and direction: the kernel that Dispatch's choice takes by the table's times, and what the
oracle's run measured for it over the least that it measured for any kernel. The bar for leaving
high precision (`min_speedup`) is part of the choice, so part of the regret is by policy; it is also
reported without. The oracle's run may be short: what both runs have is compared. Runs anywhere; no
GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from loka_compile.files import write_text
from loka_compile.lowering.cost_import import rows_of_benchmark
from loka_compile.lowering.cost_table import CostRow
from loka_compile.lowering.entries import Kernel
from loka_compile.lowering.measure import Cost
from loka_compile.lowering.programme import Programme
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.options import Options

Shape = tuple[int, int, int]
#: shape -> direction -> kernel -> microseconds
Times = dict[Shape, dict[str, dict[str, float]]]


class Bare:
    """Prices of one linear that shares nothing: whole directions, as the table has them."""

    def __init__(self, times: dict[str, dict[str, float]]) -> None:
        self.times = times

    def fwd(self, kernel: str, handed: bool = False) -> Cost | None:
        return None if handed else self.back("fwd", kernel)

    def back(self, direction: str, kernel: str, **form: Any) -> Cost | None:
        us = self.times.get(direction, {}).get(kernel)
        return None if us is None or form.get("ready") else Cost(us, "table")

    def gradient(self, rules: Any) -> Cost | None:
        return None

    def bounded(self, turned: bool) -> Cost | None:
        return None

    def saved(self, tensor: str, rules: Any) -> Cost:
        return Cost(0.0, "")


def times_of(rows: list[CostRow]) -> Times:
    found: Times = {}
    for row in rows:
        key = row.key
        per = found.setdefault((key.m, key.k, key.n), {}).setdefault(key.direction, {})
        per[key.kernel] = row.us
    return found


def choices(times: dict[str, dict[str, float]], min_speedup: float) -> dict[str, str]:
    """Direction -> kernel, by the programme that plans are made with."""
    programme = Programme(min_speedup)
    kernels = {d: [Kernel(k) for k in times.get(d, {HIGH_PRECISION: 0.0})] for d in DIRECTIONS}
    programme.add("one", kernels, Bare(times))  # type: ignore[arg-type]
    return {d: programme.solve()["one", d].kernel for d in DIRECTIONS if d in times}


def evaluate(table: list[CostRow], oracle: list[CostRow], min_speedup: float) -> dict[str, Any]:
    """Regret over the shapes and directions that both runs have, high precision among them."""
    by_table, by_oracle = times_of(table), times_of(oracle)
    cases: list[dict[str, Any]] = []
    compared: set[str] = set()
    for shape, per in sorted(by_table.items()):
        truth = by_oracle.get(shape, {})
        usable = {
            d: {k: us for k, us in times.items() if k in truth.get(d, {})}
            for d, times in per.items()
        }
        usable = {
            d: times for d, times in usable.items() if HIGH_PRECISION in times and len(times) > 1
        }
        compared.update(*usable.values())
        picked, free = choices(usable, min_speedup), choices(usable, 1.0)
        for direction, times in usable.items():
            measured = {k: truth[direction][k] for k in times}
            best = min(measured, key=measured.__getitem__)
            m, k, n = shape
            cases.append(
                {
                    "direction": direction,
                    "M": m,
                    "K": k,
                    "N": n,
                    "chosen": picked[direction],
                    "best": best,
                    "regret_percent": 100 * (measured[picked[direction]] / measured[best] - 1),
                    "without_bar_percent": 100 * (measured[free[direction]] / measured[best] - 1),
                }
            )
    if not cases:
        raise SystemExit("the two runs have no shape in common")
    regrets = [c["regret_percent"] for c in cases]
    return {
        "cases_compared": len(cases),
        "kernels": sorted(compared),
        "mean_percent": statistics.fmean(regrets),
        "max_percent": max(regrets),
        "without_bar_mean_percent": statistics.fmean(c["without_bar_percent"] for c in cases),
        "min_speedup": min_speedup,
        "cases": cases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, required=True, help="what choices are made from")
    parser.add_argument("--oracle", type=Path, required=True, help="another run, for the truth")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--min-speedup", type=float, default=Options().min_speedup)
    args = parser.parse_args()
    if args.table.resolve() == args.oracle.resolve():
        parser.error("table and oracle are to come from different runs")
    table, oracle = rows_of_benchmark(args.table), rows_of_benchmark(args.oracle)
    env = json.loads(args.table.read_text())["env"]
    result = {"env": env, **evaluate(table, oracle, args.min_speedup)}
    write_text(args.out, json.dumps(result, indent=1) + "\n")
    print({k: v for k, v in result.items() if k not in ("cases", "env")})
    for case in sorted(result["cases"], key=lambda c: -c["regret_percent"])[:10]:
        print(case)


if __name__ == "__main__":
    main()
