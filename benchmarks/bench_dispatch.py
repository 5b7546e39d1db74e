r"""The dense part of Wukong: BF16, uniform FP8 recipes, and Dispatch; training and inference.

    python benchmarks/bench_dispatch.py --scale base --batch 4096 --budget-seconds 500 \
        --out benchmarks/results/dispatch_h200.json

A training step is forward and backward to the parameters and to the input; no optimizer, no
embedding tables. Milliseconds, median over blocks of steps. Arms:
    bf16_original   the model as written, compiled by Inductor alone (in the precision of --params)
    bf16_mods       the same after apply_mods
    as_written:ARM  an arm below on the model as written: the Mods are the graph's, norms keep gains
All below run the model of bf16_mods, so that the function is the same:
    <kernel>        backend="loka", every GEMM that can take it forced to this kernel
    chain:<recipe>  backend="loka", a plan fixed by hand: our fused chain in the forward of
                    every MLP layer, torch:<recipe> for all other GEMMs but the narrow products
    dispatch        backend="loka", 8 probed steps, then the plan, tune="auto"
    dispatch:a+b    the same, with the libraries a and b only
`--arms uniform` stands for every kernel that is available here.

Every arm and mode of compiling has a process of its own. Those that make a plan come first: they
time kernels for it, in turns, while nobody else is at work. All compile side by side, in groups
that fit the device's memory. When all of a group are ready they measure in turn, one at a time on
an idle machine. Rows are written as they come; rows that --out already has are kept and not
measured again, so a run may be continued.

Where the host is the limit, two processes that do the same may differ much. `--processes N` runs N
of each arm and mode; a row is their median (`each_ms`: every one).
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import torch
from dispatch_arm import EMBEDDINGS
from turns import READY_SECONDS
from turns import Worker
from turns import in_turn

from loka_compile import _compat
from loka_compile.files import write_text
from loka_compile.lowering import cost_table
from loka_compile.lowering.cost_store import default_table
from loka_compile.lowering.libraries import LIBRARIES
from loka_compile.lowering.libraries import availability
from loka_compile.lowering.recipes import HIGH_PRECISION

PARAMS = ("bf16", "fp32_tf32", "fp32_autocast_bf16")
KEY = ("model", "scale", "batch", "mode", "cuda_graphs", "params", "arm")
ARM = Path(__file__).with_name("dispatch_arm.py")


class Subject(Worker):
    """The process of one arm in one mode of compiling. `where`: the columns of its rows."""

    def __init__(self, where: dict[str, Any], modes: list[str], args: argparse.Namespace) -> None:
        makes_plan = where["arm"].removeprefix("as_written:").startswith("dispatch")
        settings = {
            **where, "makes_plan": makes_plan, "modes": modes, "device": args.device,
            "emulate": args.emulate, "inner": args.inner, "seconds": args.seconds_per_row,
        }  # fmt: skip
        super().__init__(ARM, settings, len(modes), makes_plan)
        self.where, self.modes = where, modes


def workers_of(args: argparse.Namespace, done: Counter[tuple[Any, ...]]) -> Iterator[list[Subject]]:
    """Those of one setting together: what is compared runs in one go. done: processes of a row."""
    arms = expand(args.arms, torch.device(args.device), args.emulate)
    for scale, params, batch in itertools.product(args.scale, args.params, args.batch):
        found = []
        for arm, graphs in itertools.product(arms, args.cuda_graphs):
            where = {
                "model": "wukong", "scale": scale, "batch": batch, "params": params, "arm": arm,
                "cuda_graphs": graphs == "yes",
            }  # fmt: skip
            for number in range(args.processes):
                left = [m for m in args.modes if done[key_of({**where, "mode": m})] <= number]
                if left:
                    found.append(Subject(where, left, args))
        yield found


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[k] for k in KEY)


def merged(rows: list[dict[str, Any]], new: dict[str, Any]) -> dict[str, Any]:
    """`new`, a process's row, with what other processes measured of the same: it takes their place
    in `rows`. One that failed counts only while it is alone."""
    same = [r for r in rows if key_of(r) == key_of(new)]
    measured = [r for r in (*same, new) if r["ms"] is not None]
    row = dict(measured[-1] if measured else new)
    each = [ms for r in measured for ms in r.get("each_ms", [r["ms"]])]
    if len(each) > 1:
        row |= {"ms": statistics.median(each), "each_ms": each}
    rows[:] = [r for r in rows if r not in same] + [row]
    return row


def expand(arms: str, device: torch.device, emulate: bool) -> list[str]:
    found: list[str] = []
    for name in arms.split(","):
        if name == "uniform":
            rows = availability(device)
            found += [
                r["kernel"]
                for r in rows
                if r["kernel"] != HIGH_PRECISION and (r["available"] or emulate)
            ]
        else:
            found.append(name)
    return list(dict.fromkeys(found))


def environment(device: torch.device) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": _compat.device_key(device),
        "date": datetime.now(timezone.utc).date().isoformat(),
        **{lib.name: lib.version() for lib in LIBRARIES.values() if lib.name != "torch"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", nargs="+", default=["base"], choices=list(EMBEDDINGS))
    parser.add_argument("--batch", type=int, nargs="+", default=[4096])
    parser.add_argument("--params", nargs="+", default=["bf16"], choices=PARAMS)
    parser.add_argument("--modes", nargs="+", default=["train", "inference"])
    parser.add_argument("--cuda-graphs", nargs="+", default=["no", "yes"], choices=["no", "yes"])
    parser.add_argument("--arms", default="bf16_original,bf16_mods,dispatch,uniform")
    parser.add_argument("--budget-seconds", type=float, default=540.0)
    parser.add_argument("--seconds-per-row", type=float, default=2.0)
    parser.add_argument("--processes", type=int, default=1, help="of each arm and mode")
    parser.add_argument("--side-by-side", type=int, default=10, help="processes that compile")
    parser.add_argument(
        "--ready-seconds", type=float, default=READY_SECONDS, help="until all must have compiled"
    )
    parser.add_argument(
        "--together", action="store_true", help="all settings in one go, not one after the other"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--emulate", action="store_true", help="FP8 in software; no speed claims")
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--costs", type=Path, help="write the cost rows of this device here")
    args = parser.parse_args()

    begun = time.monotonic()
    deadline = begun + args.budget_seconds
    device = torch.device(args.device)
    rows: list[dict[str, Any]] = []
    if args.out.exists():
        # What failed is tried again.
        rows = [r for r in json.loads(args.out.read_text())["rows"] if r["ms"] is not None]
    done = Counter({key_of(r): len(r.get("each_ms", [r["ms"]])) for r in rows})
    settings = list(workers_of(args, done))
    for workers in [[*itertools.chain(*settings)]] if args.together else settings:
        together = args.side_by_side, args.ready_seconds
        for worker, turn, row in in_turn(workers, deadline, *together):
            assert isinstance(worker, Subject)
            row = merged(rows, {"ms": None, "mode": worker.modes[turn], **worker.where, **row})
            result = {"env": environment(device), "emulated": args.emulate, "rows": rows}
            write_text(args.out, json.dumps(result, indent=1) + "\n")
            shown = row["ms"] if row["ms"] is None else round(row["ms"], 3)
            elapsed = f"[{time.monotonic() - begun:.0f} s]"
            print(elapsed, *(row[k] for k in KEY), shown, row.get("error", ""), flush=True)
        if time.monotonic() > deadline:
            print("budget spent; run again with the same --out to go on", flush=True)
            break
    if args.costs is not None:
        here = _compat.device_key(device)
        own = [r for r in default_table().rows() if r.key.device == here]
        cost_table.export_rows(own, args.costs)
    summary(rows)


def summary(rows: list[dict[str, Any]]) -> None:
    """Dispatch against the two BF16 arms and the best uniform recipe, per setting."""
    groups: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if row["ms"] is not None:
            groups.setdefault(tuple(row[k] for k in KEY[:-1]), {})[row["arm"]] = row["ms"]
    for setting, ms in groups.items():
        others = {a: t for a, t in ms.items() if a not in ("dispatch", "bf16_original")}
        if "dispatch" not in ms or not others:
            continue
        best = min(others, key=others.__getitem__)
        ratios = {a: round(t / ms["dispatch"], 3) for a, t in ms.items() if a != "dispatch"}
        print(*setting, "best other:", best, "speedup of dispatch over:", ratios)


if __name__ == "__main__":
    main()
