r"""Our own host work per call: microseconds of the callable around code that costs nothing.

    python benchmarks/bench_host.py --out benchmarks/results/host_cost.json

A chain of `--linears` narrow linears on the CPU. The compiled function is replaced by one that
returns a ready result, so that what is left is what the backend adds to each call. Cases:

    training        a plan in force, probed once per 100 steps (the probed step is left out)
    eval            after training: the decisions are settled
    eval_only       mods="auto", no backward has ever run: a late checkpoint is still looked for
    cached_weights  as eval, with FP8 weights quantised once per version (the check is part of it)
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loka_compile import loka_backend
from loka_compile.lowering.libraries.torch_scaled_mm import TorchScaledMM
from loka_compile.runtime import Runtime

WIDTH = 16
CALLS = 2000


class Seen:
    """A backend that keeps the callables and the inputs of their last call."""

    def __init__(self) -> None:
        self.runtimes: list[Runtime] = []
        self.args: tuple[Any, ...] = ()

    def __call__(self, gm: Any, inputs: list[Any], *, options: Any) -> Any:
        runtime = loka_backend(gm, inputs, options=options)
        assert isinstance(runtime, Runtime)
        self.runtimes.append(runtime)

        def call(*args: Any) -> Any:
            self.args = args
            return runtime(*args)

        return call


def cost_us(seen: Seen) -> float:
    """Of one call of the newest callable, without its compiled function."""
    runtime, args = seen.runtimes[-1], seen.args
    binding = runtime.binding_of(args)
    assert binding is not None
    out = binding.built.fn(*args, *binding.extra)
    # Detached: what a hook on the result costs is torch's.
    out = tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in out)
    object.__setattr__(binding.built, "fn", lambda *args: out)
    times = []
    for _ in range(15):
        if binding.late is not None:
            binding.late.left = 10 * CALLS
        begun = time.perf_counter()
        for _ in range(CALLS):
            runtime(*args)
        times.append((time.perf_counter() - begun) / CALLS * 1e6)
    # The least: whatever else runs on the machine only adds.
    return min(times)


def model_of(linears: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(linears)))


def compiled_of(model: nn.Module, **options: Any) -> tuple[Callable[..., Any], Seen]:
    torch._dynamo.reset()
    seen = Seen()
    return torch.compile(model, backend=seen, options={"inner": "eager", **options}), seen


def cases(linears: int) -> dict[str, float]:
    x = torch.randn(16, WIDTH)
    found = {}
    fp8 = {"emulate": True, "force": {"*": "torch:rowwise"}, "mods": "off"}
    model = model_of(linears)
    call, seen = compiled_of(model, **fp8)
    for _ in range(40):
        call(x).sum().backward()
    found["training"] = cost_us(seen)
    with torch.no_grad():
        call(x)
    found["eval"] = cost_us(seen)
    model = model_of(linears)
    call, seen = compiled_of(model, mods="auto")
    with torch.no_grad():
        call(x)
        found["eval_only"] = cost_us(seen)
    with torch.no_grad():
        TorchScaledMM.why_unavailable = lambda self, device: None  # type: ignore[method-assign]
        call, seen = compiled_of(
            model_of(linears).bfloat16(), mods="off", force={"*": "torch:tensorwise"}
        )
        call(x.bfloat16())
        found["cached_weights"] = cost_us(seen)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--linears", type=int, default=100)
    args = parser.parse_args()
    torch.manual_seed(0)
    result = {
        "env": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cpu": platform.processor() or platform.machine(),
            "date": datetime.now(timezone.utc).date().isoformat(),
        },
        "linears": args.linears,
        "us_per_call": {k: round(v, 2) for k, v in cases(args.linears).items()},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
