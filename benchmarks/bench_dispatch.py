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
`--arms uniform` stands for every kernel that is available here. Rows are written as they come; rows
that --out already has are kept and not measured again, so a run may be continued.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from collections.abc import Iterator
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import torch

import loka_compile
from loka_compile import _compat
from loka_compile.files import write_text
from loka_compile.lowering import cost_table
from loka_compile.lowering.cost_store import default_table
from loka_compile.lowering.libraries import LIBRARIES
from loka_compile.lowering.libraries import availability
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.options import PROBE_STEPS
from loka_compile.zoo.wukong import WukongConfig
from loka_compile.zoo.wukong import WukongDense

#: scale -> number of embeddings; n = nF + nL, so that every layer keeps its width.
EMBEDDINGS = {"tiny": 32, "small": 64, "base": 128}
PARAMS = ("bf16", "fp32_tf32", "fp32_autocast_bf16")
AS_WRITTEN = "as_written:"
KEY = ("model", "scale", "batch", "mode", "cuda_graphs", "params", "arm")


def build(scale: str, params: str, device: torch.device) -> WukongDense:
    torch.manual_seed(0)
    model = WukongDense(WukongConfig.of(scale), EMBEDDINGS[scale], 0).to(device)
    return model.bfloat16() if params == "bf16" else model


def chain_plan(cfg: WukongConfig, recipe: str) -> dict[str, Any]:
    """`force` of the arm chain:<recipe>: by layer name, three modules per hidden MLP layer."""
    rest = f"torch:{recipe}"
    fused = {"fwd": f"loka:{recipe}", "dgrad": rest, "wgrad": rest}
    names = [f"*.mlp.{3 * i}" for i in range(len(cfg.mlp))]
    names += [f"head.{3 * i}" for i in range(len(cfg.head))]
    narrow = dict.fromkeys(("*.projection", "*.lcb"), HIGH_PRECISION)
    return {"*": rest, **narrow, **dict.fromkeys(names, fused)}


class Arm:
    """One arm: a model, and how it is compiled in default mode and under CUDA graphs."""

    def __init__(self, name: str, model: WukongDense, args: argparse.Namespace) -> None:
        self.name, self.args = name, args
        self.model = copy.deepcopy(model)
        self.plain = name.startswith("bf16_")
        if name != "bf16_original" and not name.startswith(AS_WRITTEN):
            loka_compile.apply_mods(self.model)

    def compile(self, cuda_graphs: bool) -> Callable[..., torch.Tensor]:
        mode = "reduce-overhead" if cuda_graphs else None
        if self.plain:
            if self.args.inner != "inductor":
                return torch.compile(self.model, backend=self.args.inner)
            return torch.compile(self.model, mode=mode)
        options: dict[str, Any] = {
            "mods": "on",
            "mode": mode,
            "emulate": self.args.emulate,
            "inner": self.args.inner,
        }
        name = self.name.removeprefix(AS_WRITTEN)
        kind, _, libraries = name.partition(":")
        if kind == "chain":
            options["force"] = chain_plan(self.model.cfg, libraries)
        elif kind != "dispatch":
            options["force"] = {"*": name}
        elif libraries:
            options["libraries"] = tuple(libraries.split("+"))
        return torch.compile(self.model, backend="loka", options=options)

    def choices(self) -> dict[str, list[str]]:
        plan = loka_compile.plan_of(self.model)
        return {name: list(site.kernels) for name, site in sorted(plan.sites.items())}


def step_functions(
    arm: Arm, compiled: Callable[..., torch.Tensor], x: torch.Tensor, params: str
) -> dict[str, Callable[[], None]]:
    """mode -> one step of it."""
    nothing = x.new_empty((x.shape[0], 0))
    grad = torch.full((x.shape[0],), 1.0 / x.shape[0], device=x.device)
    leaves = [*arm.model.parameters(), x]

    def autocast() -> contextlib.AbstractContextManager[Any]:
        if params == "fp32_autocast_bf16":
            return torch.autocast(x.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def train() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        for leaf in leaves:
            leaf.grad = None
        with autocast():
            y = compiled(x, nothing)
        y.backward(grad.to(y.dtype))

    def inference() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad(), autocast():
            compiled(x, nothing)

    return {"train": train, "inference": inference}


def time_ms(step: Callable[[], None], device: torch.device, seconds: float) -> float:
    """Median milliseconds per step, over blocks of steps that are long enough to be timed."""

    def block(steps: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        for _ in range(steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begun) / steps

    one = block(3)
    steps = max(1, min(20, int(0.05 / one)))
    repeats = max(5, min(50, int(seconds / (steps * one))))
    return 1e3 * statistics.median(block(steps) for _ in range(repeats))


def measure(
    arm: Arm, x: torch.Tensor, params: str, modes: list[str], cuda_graphs: bool, seconds: float
) -> Iterator[dict[str, Any]]:
    """A row per mode. A training warm-up comes first where a plan has to be made."""
    torch._dynamo.reset()
    begun = time.perf_counter()
    steps = step_functions(arm, arm.compile(cuda_graphs), x, params)
    if not arm.plain and not arm.choices():
        for _ in range(PROBE_STEPS + 3):
            steps["train"]()
    for mode in modes:
        arm.model.train(mode == "train")
        for _ in range(5):
            steps[mode]()
        ready = time.perf_counter() - begun
        ms = time_ms(steps[mode], x.device, seconds)
        row = {"mode": mode, "cuda_graphs": cuda_graphs, "ms": ms, "ready_s": round(ready, 1)}
        yield row if arm.plain else {**row, "kernels": arm.choices()}
        begun = time.perf_counter()


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
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--emulate", action="store_true", help="FP8 in software; no speed claims")
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--costs", type=Path, help="write the cost rows of this device here")
    args = parser.parse_args()

    deadline = time.monotonic() + args.budget_seconds
    device = torch.device(args.device)
    arms = expand(args.arms, device, args.emulate)
    rows: list[dict[str, Any]] = []
    if args.out.exists():
        # What failed is tried again.
        rows = [r for r in json.loads(args.out.read_text())["rows"] if r["ms"] is not None]
    done = {tuple(r[k] for k in KEY) for r in rows}

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        result = {"env": environment(device), "emulated": args.emulate, "rows": rows}
        write_text(args.out, json.dumps(result, indent=1) + "\n")
        shown = row["ms"] if row["ms"] is None else round(row["ms"], 3)
        print(*(row[k] for k in KEY), shown, row.get("error", ""), flush=True)

    def run(scale: str, params: str, batch: int) -> None:
        torch.set_float32_matmul_precision("high" if params == "fp32_tf32" else "highest")
        model = build(scale, params, device)
        dtype = torch.bfloat16 if params == "bf16" else torch.float32
        cfg = model.cfg
        x = torch.randn(batch, EMBEDDINGS[scale], cfg.d, device=device).to(dtype)
        x.requires_grad_()
        for name in arms:
            arm = Arm(name, model, args)
            for graphs in args.cuda_graphs:
                where = {"model": "wukong", "scale": scale, "batch": batch}
                base = {**where, "params": params, "arm": name, "cuda_graphs": graphs == "yes"}
                missing = [
                    m for m in args.modes if tuple({**base, "mode": m}[k] for k in KEY) not in done
                ]
                if not missing:
                    continue
                if time.monotonic() > deadline:
                    raise TimeoutError
                try:
                    for row in measure(
                        arm, x, params, missing, graphs == "yes", args.seconds_per_row
                    ):
                        keep({**base, **row})
                except Exception as error:
                    why = f"{type(error).__name__}: {error}".splitlines()[0]
                    keep({**base, "mode": missing[0], "ms": None, "error": why})
                    if device.type == "cuda":
                        # An illegal access spoils the process: this raises then, and ends the run.
                        torch.cuda.synchronize(device)
            del arm
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()

    try:
        for scale in args.scale:
            for params in args.params:
                for batch in args.batch:
                    run(scale, params, batch)
    except TimeoutError:
        print("budget spent; run again with the same --out to go on", flush=True)
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
