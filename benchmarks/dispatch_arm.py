"""One arm of `bench_dispatch.py` in a process of its own: get ready, wait for a turn, measure.

What ran before in a process changes what its host costs per step, so that arms which share one
cannot be compared where the host is the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from turns import Watch
from turns import say
from turns import settings
from turns import wait_for_turn

import loka_compile
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.options import PROBE_STEPS
from loka_compile.options import Options
from loka_compile.zoo.wukong import WukongConfig
from loka_compile.zoo.wukong import WukongDense

#: scale -> number of embeddings; n = nF + nL, so that every layer keeps its width.
EMBEDDINGS = {"tiny": 32, "small": 64, "base": 128}
AS_WRITTEN = "as_written:"


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
        self.name, self.args, self.model = name, args, model
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
            # A rival does not pay for probes, nor for the compile of a probed step.
            options |= {"force": {"*": name}, "probe_every": 0}
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


def time_ms(step: Callable[[], None], device: torch.device, seconds: float) -> dict[str, float]:
    """Medians over blocks of steps that are long enough to be timed: `ms` per step, and `host_ms`,
    after which all kernels of a step were started, on a device with nothing else to do."""

    def block(steps: int) -> tuple[float, float]:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        step()
        started = time.perf_counter()
        for _ in range(steps - 1):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begun) / steps, started - begun

    one, _ = block(3)
    steps = max(1, min(20, int(0.05 / one)))
    repeats = max(5, min(50, int(seconds / (steps * one))))
    ms, host_ms = zip(*(block(steps) for _ in range(repeats)), strict=True)
    return {"ms": 1e3 * statistics.median(ms), "host_ms": 1e3 * statistics.median(host_ms)}


def get_ready(arm: Arm, steps: dict[str, Callable[[], None]], args: argparse.Namespace) -> None:
    """Compile and run every mode; where a plan has to be made, a training warm-up comes first."""
    if not arm.plain and not arm.choices():
        for _ in range(PROBE_STEPS + 3):
            steps["train"]()
    for mode in args.modes:
        arm.model.train(mode == "train")
        # Beyond the steps that are observed, and those that record a CUDA graph.
        for _ in range(PROBE_STEPS + 4):
            steps[mode]()
    if args.makes_plan and "train" in args.modes:
        # The first probe with the plan in force compiles its variant: not in the arm's turn.
        arm.model.train()
        for _ in range(Options().probe_every):
            steps["train"]()


def main() -> None:
    args = argparse.Namespace(**settings())
    device = torch.device(args.device)
    begun = time.perf_counter()
    torch.set_float32_matmul_precision("high" if args.params == "fp32_tf32" else "highest")
    arm = Arm(args.arm, build(args.scale, args.params, device), args)
    dtype = torch.bfloat16 if args.params == "bf16" else torch.float32
    x = torch.randn(args.batch, EMBEDDINGS[args.scale], arm.model.cfg.d, device=device).to(dtype)
    x.requires_grad_()
    steps = step_functions(arm, arm.compile(args.cuda_graphs), x, args.params)
    watch = Watch(lambda: bool(arm.choices())) if args.makes_plan else None
    with loka_compile.explain() as report:
        get_ready(arm, steps, args)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if watch is not None:
        watch.end()
    notes = [n for g in report.graphs for n in g.notes if n.startswith("plan made in")]
    say(ready_s=round(time.perf_counter() - begun, 1), plan_notes=notes)
    for mode in args.modes:
        wait_for_turn()
        arm.model.train(mode == "train")
        for _ in range(3):
            steps[mode]()
        times = time_ms(steps[mode], device, args.seconds)
        say(mode=mode, **times, **({} if arm.plain else {"kernels": arm.choices()}))


if __name__ == "__main__":
    main()
