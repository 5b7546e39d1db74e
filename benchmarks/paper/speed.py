"""What figures 10 and 11 share: dense parts made ready in several ways, and their timing."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from datetime import timezone
from typing import Any

import torch
from torch import nn

import loka_compile
from loka_compile.train.arms import UNIFORM_SIDE
from loka_compile.train.environment import versions
from loka_compile.zoo import MODELS
from loka_compile.zoo import History
from loka_compile.zoo import Recommender

FIELDS = 128
#: Of InterFormer's sequence at these sizes.
HISTORY = 50
#: The first steps compile, probe and swap to the plan; the ninth has it.
WARMUP = 14


@dataclass(frozen=True)
class Case:
    """One row of a figure. ``dtype``: of parameters and inputs; FP32 means TF32 products."""

    model: str
    scale: str
    batch: int
    arm: str
    mode: str  # torch.compile's
    dtype: str  # bfloat16 or float32
    train: bool


def environment(device: torch.device) -> dict[str, Any]:
    return {**versions(device), "date": datetime.now(timezone.utc).date().isoformat()}


def make(model: str, scale: str) -> Recommender:
    """The model with ``FIELDS`` embeddings and no dense features; tables of two rows."""
    torch.manual_seed(0)
    kind = MODELS[model]
    return kind(kind.scales[scale], [2] * FIELDS, 0, history=History(0, HISTORY))


def prepare(arm: str, dense: nn.Module, mode: str, options: dict[str, Any]) -> Callable[..., Any]:
    """``dense`` compiled as ``arm``: original, bf16_mods, torchao_*, or loka (model as written)."""
    inner = options.get("inner", "inductor")
    how = {} if mode == "default" else {"mode": mode}
    if arm == "loka":
        loka = {"mods": "on", **options, **({} if mode == "default" else {"mode": mode})}
        return torch.compile(dense, backend="loka", options=loka, dynamic=False)
    if arm.endswith("mods"):
        loka_compile.apply_mods(dense)
    if arm.startswith("torchao"):
        _torchao(dense, arm)
    if inner != "inductor":
        return torch.compile(dense, backend=inner, dynamic=False)
    return torch.compile(dense, dynamic=False, **how)


def _torchao(dense: nn.Module, arm: str) -> None:
    """TorchAO's own conversion, as its users write it: ``torchao_tensorwise[_mods]``."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8 import convert_to_float8_training

    recipe = arm.removeprefix("torchao_").removesuffix("_mods")
    convert_to_float8_training(
        dense,
        config=Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=lambda m, _: min(m.in_features, m.out_features) >= UNIFORM_SIDE,
    )


def steps(case: Case, device: torch.device, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    """(the dense part, a function that runs one step of ``case``)."""
    dtype = getattr(torch, case.dtype)
    recommender = make(case.model, case.scale)
    dense = copy.deepcopy(recommender.dense).to(device=device, dtype=dtype).train(case.train)
    inputs = [
        t if t.dtype == torch.bool else t.to(dtype)
        for t in recommender.example_inputs(case.batch, device)
    ]
    del recommender
    # TorchAO's row-wise recipes refuse an input that needs a gradient at odd places; all arms alike
    # take the gradient of the embeddings, which a recommender needs.
    inputs[0].requires_grad_(case.train)
    compiled = prepare(case.arm, dense, case.mode, options)
    leaves = [*dense.parameters(), inputs[0]]

    def step() -> None:
        if not case.train:
            with torch.no_grad():
                compiled(*inputs)
            return
        if case.mode != "default":
            torch.compiler.cudagraph_mark_step_begin()
        for leaf in leaves:
            leaf.grad = None
        compiled(*inputs).float().square().mean().backward()

    return dense, step


@dataclass
class Ready:
    """A case that has been compiled, planned and run: the next steps are like all that follow."""

    case: Case
    dense: nn.Module
    step: Callable[[], None]
    compile_s: float
    fp8: int
    directions: int


def ready(
    case: Case,
    device: torch.device,
    options: dict[str, Any],
    trained: Ready | None = None,
    made: Callable[[nn.Module], None] = lambda dense: None,
) -> Ready:
    """`trained`: the training of the same arm, whose plan an inference of loka then serves by.

    `made` hears of the model before its first step."""
    torch.set_float32_matmul_precision("high")
    begun = time.perf_counter()
    if case.arm == "loka" and not case.train and trained is not None:
        plan = loka_compile.plan_of(trained.dense)
        if plan.sites:
            options = {**options, "plan": plan, "tune": "never"}
    with loka_compile.explain() as report:
        dense, step = steps(case, device, options)
        made(dense)
        if case.arm == "loka" and not case.train and "plan" not in options:
            # What serves has been trained: the plan comes from training steps.
            _plan_by_training(case, dense, device, options)
        for _ in range(WARMUP):
            step()
        _wait(device)
    kernels = [c["kernel"] if c else None for s in report.sites for c in s["directions"].values()]
    fp8 = sum(kernel not in (None, "high_precision") for kernel in kernels)
    return Ready(case, dense, step, time.perf_counter() - begun, fp8, len(kernels))


def timed(subject: Ready, device: torch.device, repeats: int = 30) -> dict[str, Any]:
    """Milliseconds per step (median), peak memory, and what of it ran FP8."""
    # What compiling and trying kernels took is given back; the peak is that of a step.
    begin_peak(device)
    for _ in range(3):
        subject.step()
    times = [_time(subject.step, device) for _ in range(repeats)]
    return {
        "ms": statistics.median(times),
        "ms_quartiles": statistics.quantiles(times, n=4)[::2],
        **peak(device),
        "compile_s": subject.compile_s,
        "examples_per_s": subject.case.batch / statistics.median(times) * 1e3,
        "fp8_directions": subject.fp8,
        "directions": subject.directions,
    }


def measure(case: Case, device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    """In this process, alone."""
    torch._dynamo.reset()
    begin_peak(device)
    return timed(ready(case, device, options), device)


def begin_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak(device: torch.device) -> dict[str, float | None]:
    """GiB since ``begin_peak``: of tensors, and of all that the allocator held for them (under
    CUDA graphs a step allocates nothing, and only the second tells).
    """
    if device.type != "cuda":
        return {"peak_gib": None, "reserved_gib": None}
    held = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return dict(zip(("peak_gib", "reserved_gib"), (b / 2**30 for b in held), strict=True))


def _plan_by_training(
    case: Case, dense: nn.Module, device: torch.device, options: dict[str, Any]
) -> None:
    inputs = make(case.model, case.scale).example_inputs(case.batch, device)
    dtype = getattr(torch, case.dtype)
    own = [t if t.dtype == torch.bool else t.to(dtype) for t in inputs]
    compiled = torch.compile(
        dense, backend="loka", options={"mods": "on", **options}, dynamic=False
    )
    for _ in range(10):
        compiled(*own).float().square().mean().backward()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _time(step: Callable[[], None], device: torch.device) -> float:
    """Milliseconds of one step, on the device's clock where it has one."""
    if device.type != "cuda":
        begun = time.perf_counter()
        step()
        return (time.perf_counter() - begun) * 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    step()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last)
