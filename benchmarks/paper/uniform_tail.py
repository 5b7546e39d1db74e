"""Where uniform FP8 begins to lose: the same clicks, seen through heavier and heavier tails.

    python benchmarks/paper/uniform_tail.py                 # a CPU; hours
    python benchmarks/paper/uniform_tail.py --seeds 2 --tails 1 4

One scale for a whole tensor is set by its largest value, and what is 2^17 times smaller becomes
zero. Wukong `tiny` reads 160 raw counts of a synthetic stream, so that its first linear is wide
enough for uniform FP8 (TorchAO tensorwise in all directions, on every linear with both sides >=
128). ``tail`` multiplies the spread of the logarithms of the counts: ids and clicks stay the same,
and a LayerNorm behind the first linear lets high precision learn from each of them. ``loka``
chooses per site. Losses are expected ones: the probability of every click is known.

`spread`: how many octaves the largest count of a batch lies above the largest of its median row.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from quality_figure import QUALITY
from quality_figure import parser
from quality_figure import study
from quality_figure import write

from loka_compile.data import open_source
from loka_compile.train.study import Unit
from loka_compile.train.study import load_trace

PAPER = {
    "model": "Wukong, production scale",
    "hardware": "64 H100",
    "note": "uniform FP8 is up to 2.5 % worse",
}
ARMS = ("original", "fp8", "bf16_mods", "loka")
#: Beyond 4 the variance of more than a row in some hundred overflows FP32 in the LayerNorm.
TAILS = (1.0, 2.0, 2.5, 3.0, 3.5, 4.0)
#: The linear that reads the counts.
FIRST = "dense_mlp.0"
DATA = "synthetic:fields=6,dense=160,tail={:g},rows={}"


def spread(data: str, batch: int, batches: int = 40) -> float:
    """Octaves between the largest count of a batch and that of its median row; the median batch."""
    found = []
    for one, _ in zip(open_source(data, dense="raw").batches(batch), range(batches), strict=False):
        largest = one.dense.abs().amax(dim=1)
        found.append(float((largest.max() / largest.median()).log2()))
    return float(np.median(found))


def chosen(args: argparse.Namespace, folder: str) -> dict[str, str] | None:
    """Direction -> the kernel that `loka` gave the first linear, in the first seed there is."""
    for seed in range(args.seeds):
        path = Unit(seed, "loka").path(args.work / folder)
        if path.exists():
            sites = load_trace(path)[1]["sites"]
            directions = next(s["directions"] for s in sites if s["name"].endswith(FIRST))
            return {name: one["kernel"] for name, one in directions.items()}
    return None


def main() -> None:
    made = parser(__doc__, "uniform_tail", seeds=8, data=False)
    made.add_argument("--tails", type=float, nargs="+", default=list(TAILS))
    made.add_argument("--rows", type=int, default=60_000)
    made.add_argument("--beside", nargs="*", default=[], help="sources to tell the spread of, too")
    args = made.parse_args()
    beside = {data.partition(":")[0]: spread(data, args.batch) for data in args.beside}
    found: dict[str, Any] = {}
    for tail in args.tails:
        args.data = DATA.format(tail, args.rows)
        folder = f"tail-{tail:g}"
        one = study(args, folder, ARMS, args.time_limit, dense="raw", options=QUALITY)
        one |= {
            "tail": tail,
            "spread_octaves": spread(args.data, args.batch),
            "first_linear": chosen(args, folder),
        }
        found[f"tail {tail:g}"] = one
        write(args, PAPER, found, spread_octaves_of=beside)


if __name__ == "__main__":
    main()
