"""Figure 3: uniform FP8 (TorchAO tensorwise, linears with both sides >= 128), quality and speed.

    python benchmarks/paper/figure_3.py --data kuairand:DIR --label is_click --jobs 18
    python benchmarks/paper/figure_3.py --data kuairand:DIR --parts quality --limit 30720  # a CPU

Quality: from a small model with standardised inputs to a deep one whose MLPs read log counts
without any norm, and that at five times the learning rate: where does uniform FP8 begin to lose?
`loka` is what the backend makes of the same model. Against the original in bf16, per window.
Throughput: training steps of the dense part of Wukong `base`, TorchAO's own conversion of the
original against the original; needs a GPU with FP8.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from quality_figure import QUALITY
from quality_figure import parser
from quality_figure import run_cases
from quality_figure import write
from speed import Case
from speed import measure

from loka_compile.train.arms import has_fp8

PAPER = {
    "model": "Wukong, production scale",
    "hardware": "64 H100",
    "rll_percent": 2.5,
    "slowdown": 520 / 395,
    "note": "up to 2.5 % worse and 1.3x slower",
}
#: name -> scale, form of the dense values, learning rate
CASES = {
    "tiny, standardised": ("tiny", "standard", 1e-3),
    "stress, raw counts": ("stress", "raw", 1e-3),
    "stress without norms, log counts": ("stress-wide", "log", 1e-3),
    "stress without norms, log counts, 5 x learning rate": ("stress-wide", "log", 5e-3),
}
ARMS = ("original", "fp8", "bf16_mods", "loka")


def throughput(device: torch.device, scale: str, batch: int) -> dict[str, Any]:
    """Milliseconds per training step, and how much slower TorchAO made it."""
    found: dict[str, Any] = {"model": "wukong", "scale": scale, "batch": batch}
    for arm in ("original", "torchao_tensorwise"):
        found[arm] = measure(
            Case("wukong", scale, batch, arm, "default", "bfloat16", True), device, {}
        )
    return found | {"slowdown": found["torchao_tensorwise"]["ms"] / found["original"]["ms"]}


def main() -> None:
    made = parser(__doc__, "figure_3", seeds=4)
    parts = ("quality", "throughput")
    made.add_argument("--parts", nargs="+", default=list(parts), choices=parts)
    args = made.parse_args()
    more = {}
    if args.out.exists():
        held = json.loads(args.out.read_text())
        more = {k: held[k] for k in ("throughput",) if k in held}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = {}
    for name, (scale, dense, lr) in CASES.items():
        how = {"scale": scale, "dense": dense, "lr": lr, "options": QUALITY}
        cases[name] = (f"{scale}-{dense}-{lr:g}", ARMS, how)
    if "quality" not in args.parts:
        # Only what is there: the throughput stands in the same file.
        args.time_limit = -1.0
    elif args.time_limit is not None and "throughput" in args.parts and not more:
        args.time_limit -= 60.0
    found = run_cases(args, cases, lambda found: write(args, PAPER, found, **more))
    if "throughput" in args.parts and has_fp8(device) and found and not more:
        write(args, PAPER, found, throughput=throughput(device, "base", 4096))


if __name__ == "__main__":
    main()
