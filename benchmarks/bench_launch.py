r"""Host time of a call of our own ops in a step that is settled: microseconds until Python goes on.

    python benchmarks/bench_launch.py --out benchmarks/results/launch_h200.json

Small operands, so that the device is never the one that is waited for. `us` is the least of many
short runs: whatever else the machine does only adds. `by_triton_us` is the same with Triton's own
launcher under our launches, where this version can be told so. What torch takes for a launch
(`add_`), an FP8 product and an allocation says what the machine is.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import torch

from loka_compile import _compat
from loka_compile.files import write_text
from loka_compile.lowering import chain
from loka_compile.lowering import chain_backward
from loka_compile.lowering import interaction
from loka_compile.lowering.weights import quantize_weight
from loka_compile.train.environment import versions

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CALLS, REPEATS = 100, 60


def cases(device: torch.device) -> dict[str, Callable[[], Any]]:
    """As compiled code calls them: a training step's, in its usual forms."""
    m, n, k, block = 128, 512, 512, 256

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, device=device).to(dtype)

    a, w, one = made(m, k, dtype=E4M3), made(n, k, dtype=E4M3), torch.ones((), device=device)
    rows, columns = torch.ones(m, 1, device=device), torch.ones(n, 1, device=device)
    gy, u, r = made(m, n), made(m, n), torch.ones(m, n // block, device=device)
    cells = torch.zeros(2, dtype=torch.int64, device=device)
    weight = torch.zeros(n, k, device=device)
    x, p, left = made(64, 32, 64), made(16, 32).t(), made(24, 32)
    gfm, gc = made(64, 32, 16), made(64, 24, 64)
    norm = (block, 1e-6, True, "hard_swish", False, True, torch.bfloat16)
    back = (block, "hard_swish", False)
    return {
        "fused_forward": lambda: chain._fused_chain_cuda(
            a, one, w, one, None, None, *norm, None, True, False
        ),
        "fused_forward_rows_to_fp8": lambda: chain._fused_chain_cuda(
            a, rows, w, columns, None, None, *norm, one, True, True
        ),
        "fused_backward": lambda: chain_backward._fused_chain_backward_cuda(
            gy, u, r, None, *back, False, E5M2, False, E5M2, cells
        ),
        "fused_backward_rows": lambda: chain_backward._fused_chain_backward_cuda(
            gy, u, r, None, *back, True, E5M2, True, E5M2
        ),
        "fused_backward_groups": lambda: chain_backward._fused_chain_backward_groups_cuda(
            gy, u, r, None, *back, E4M3, E4M3
        ),
        "quantize_weight": lambda: quantize_weight(
            weight, torch.bfloat16, "loka:tensorwise", "torch:tensorwise"
        ),
        "interaction": lambda: interaction._forward_cuda(x, p, left),
        "interaction_backward": lambda: interaction._backward_cuda(gfm, gc, x, p, left),
        "scaled_mm": lambda: torch._scaled_mm(a, w.t(), one, one, out_dtype=torch.bfloat16),
        "add_": lambda: one.add_(0),
        "empty": lambda: torch.empty((128, 512), dtype=torch.bfloat16, device=device),
    }


def host_us(call: Callable[[], Any]) -> float:
    for _ in range(5):
        call()
    best = float("inf")
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - begun) / CALLS * 1e6)
    return best


def by_triton(call: Callable[[], Any]) -> float | None:
    """The same with every direct launch taken away, if there are any."""
    import gc

    call()
    try:
        from loka_compile.kernels.launch import Compiled
        from loka_compile.kernels.launch import Recipes
    except ImportError:
        return None
    known = [one for one in gc.get_objects() if type(one) in (Compiled, Recipes)]
    held = [(one, one.direct) for one in known if isinstance(one, Compiled)]
    for one, _ in held:
        one.direct = None
    for recipe in known:
        if isinstance(recipe, Recipes):
            recipe.clear()
    try:
        return host_us(call)
    finally:
        for one, direct in held:
            one.direct = direct


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    env = {
        **versions(),
        "device": _compat.device_key(device),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    result: dict[str, Any] = {"env": env, "rows": []}
    with torch.no_grad():
        for name, call in cases(device).items():
            row = {"op": name, "us": round(host_us(call), 2)}
            other = None if name in ("scaled_mm", "add_", "empty") else by_triton(call)
            if other is not None:
                row["by_triton_us"] = round(other, 2)
            result["rows"].append(row)
            print(row, flush=True)
    write_text(args.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
