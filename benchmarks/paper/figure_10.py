"""Figure 10: training and in-trainer inference, each model, against BF16+Mods and the original.

    python benchmarks/paper/figure_10.py --budget 540   # the most telling rows first
    python benchmarks/paper/figure_10.py --models dhen --batches 4096

Compute only: the dense part, forward and backward to parameters and input, no optimizer, no tables,
no communication. A row that is in the file already is not measured again (--again does), so several
runs add up. The file is written after every row. With --jobs, arms compile side by side, each in a
process of its own, then measure one at a time (`turns.py`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from speed import Case
from speed import environment
from speed import measure
from turns import READY_SECONDS
from turns import Worker
from turns import in_turn

from loka_compile.files import write_text

RESULTS = Path(__file__).parents[1] / "results"
CHILD = Path(__file__).with_name("speed_arm.py")
PAPER = {
    "train": 1.19,
    "inference": 1.4,
    "note": "at most 1.19x in training and 1.4x in inference over models rewritten with the Mods; "
    "16 to 256 H100, B200, MI300X, MI350X, GB200, communication included",
}
#: The paper's Figure 3, lower half: TorchAO tensorwise on the original, 1.3x slower on 64 H100.
ARMS = ("bf16_mods", "loka", "original", "torchao_tensorwise")


def cases(args: argparse.Namespace) -> list[Case]:
    """In the order of what they tell: one batch size everywhere before the next."""
    order = itertools.product(args.batches, args.dtypes, args.modes, args.models)
    return [
        Case(model, args.scale, batch, arm, mode, dtype, train)
        for batch, dtype, mode, model in order
        for train in (True, False)
        for arm in args.arms
        if train or not arm.startswith("torchao")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", default=["wukong", "dhen", "interformer", "dcn_v2", "elfm", "dlrm"]
    )
    parser.add_argument("--scale", default="base")
    parser.add_argument("--batches", nargs="+", type=int, default=[4096, 1024, 16384])
    parser.add_argument("--modes", nargs="+", default=["default", "reduce-overhead"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--inner", default="inductor", help="eager: to try the script on a CPU")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile side by side")
    parser.add_argument(
        "--ready-seconds", type=float, default=READY_SECONDS, help="with --jobs: to compile in"
    )
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "figure_10_h200.json")
    args = parser.parse_args()

    device = torch.device(args.device)
    options: dict[str, Any] = {} if args.inner == "inductor" else {"inner": args.inner}
    if device.type == "cpu":
        options["emulate"] = True
    result: dict[str, Any] = {"rows": []}
    if args.out.exists() and not args.again:
        result = json.loads(args.out.read_text())
        # What failed is tried again.
        result["rows"] = [row for row in result["rows"] if "ms" in row]
    env = environment(device)
    result |= {"env": env, "paper": PAPER}
    known = {tuple(row["case"].values()) for row in result["rows"]}
    missing = [case for case in cases(args) if tuple(asdict(case).values()) not in known]
    how = side_by_side if args.jobs > 1 else one_by_one
    for case, row in how(missing, device, options, args):
        result["rows"].append({"case": asdict(case), **row, "date": env["date"]})
        write_text(args.out, json.dumps(result, indent=1) + "\n")
        print(*asdict(case).values(), {k: v for k, v in row.items() if k in ("ms", "error")})


Rows = Iterator[tuple[Case, dict[str, Any]]]


def one_by_one(
    missing: list[Case], device: torch.device, options: dict[str, Any], args: argparse.Namespace
) -> Rows:
    end, longest = time.time() + args.budget, 0.0
    for case in missing:
        begun = time.time()
        if begun + longest > end:
            print("out of time; run again to go on")
            return
        try:
            row = measure(case, device, options)
        except Exception as e:  # one arm that cannot run must not take the others with it
            row = {"error": f"{type(e).__name__}: {e}"[:300]}
        longest = max(longest, time.time() - begun)
        yield case, row


def side_by_side(
    missing: list[Case], device: torch.device, options: dict[str, Any], args: argparse.Namespace
) -> Rows:
    """Training and inference of an arm share a process, and its plan."""
    groups: dict[Case, list[Case]] = {}
    for case in missing:
        groups.setdefault(replace(case, train=True), []).append(case)
    waiting = sorted(
        groups.values(),
        key=lambda g: (
            args.batches.index(g[0].batch),
            args.dtypes.index(g[0].dtype),
            args.models.index(g[0].model),
        ),
    )
    workers = {}
    for group in waiting:
        makes_plan = group[0].arm == "loka"
        settings = {
            "cases": [asdict(c) for c in group], "device": str(device), "options": options,
            "makes_plan": makes_plan,
        }  # fmt: skip
        workers[Worker(CHILD, settings, len(group), makes_plan)] = group
    end = time.monotonic() + args.budget
    # Batch by batch: what is compared is measured within the same minutes.
    for first in range(0, len(waiting), args.jobs):
        wave = list(workers)[first : first + args.jobs]
        for worker, turn, row in in_turn(wave, end, args.jobs, args.ready_seconds):
            yield workers[worker][turn], row
    if time.monotonic() > end:
        print("out of time; run again to go on")


if __name__ == "__main__":
    main()
