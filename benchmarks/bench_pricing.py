"""Do prices of parts add up to what a whole site takes, forward and backward?

    python benchmarks/bench_pricing.py --out benchmarks/results/pricing_h200.json

Linear -> BlockNorm -> Hard Swish as one `loka::` op, compiled by Inductor, forward and backward
under CUDA-graph replay, for several combinations of kernels; beside it the sum of parts that
Dispatch counts with (`lowering/site_prices.py`; parts without a row are timed, and kept in the cost
table). What matters most is the order of the combinations: `regret_percent` is what the cheapest by
prices costs over the cheapest as measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.files import write_text
from loka_compile.lowering import chain
from loka_compile.lowering import ops
from loka_compile.lowering.epilogue import Epilogue
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.parts import Place
from loka_compile.lowering.recipes import HIGH_PRECISION as HIGH
from loka_compile.lowering.site_prices import SitePrices

SHAPES = [
    (4096, 2048, 2048), (4096, 4096, 2048), (4096, 2048, 512), (1024, 2048, 2048),
    (8192, 1024, 1024), (16384, 2048, 2048),
]  # fmt: skip
T, R = "torch:tensorwise", "torch:rowwise"
KERNELS = [
    (HIGH, HIGH, HIGH), (T, T, T), (R, R, R), ("loka:tensorwise", T, T), ("loka:rowwise", T, T),
    ("loka:rowwise", R, R), ("loka:rowwise", T, R), ("loka:rowwise", HIGH, HIGH),
    ("loka:rowwise", T, HIGH), ("loka:rowwise", HIGH, T), (HIGH, T, T),
]  # fmt: skip
Kernels = tuple[str, str, str]


def step_us(shape: tuple[int, int, int], form: Epilogue, kernels: Kernels) -> float:
    """Median microseconds of one forward and backward."""
    from triton.testing import do_bench_cudagraph

    m, k, n = shape
    device = torch.device("cuda")
    x = torch.randn(m, k, device=device).bfloat16().requires_grad_()
    w = (torch.randn(n, k, device=device) / k**0.5).bfloat16().requires_grad_()
    gain = torch.ones(n, device=device).bfloat16().requires_grad_()
    gy = torch.randn(m, n, device=device).bfloat16()

    def forward(x: Tensor, w: Tensor, gain: Tensor) -> Tensor:
        return ops.FUSED(
            x, None, None, w, gain, form.block, 1e-6, form.act, form.gate, *kernels, "y", [], None,
            None, None, True, None, None, None,
        )[0]  # fmt: skip

    torch._dynamo.reset()
    compiled = torch.compile(forward, dynamic=False)

    def step() -> Any:
        return torch.autograd.grad(compiled(x, w, gain), (x, w, gain), gy)

    for _ in range(3):
        step()
    return statistics.median(do_bench_cudagraph(step, rep=10) for _ in range(3)) * 1e3


def priced_us(prices: SitePrices, kernels: Kernels) -> float:
    """The sum that the programme minimises, of this combination."""
    fwd, dgrad, wgrad = kernels
    rules = chain.backward_rules(*kernels)
    parts = [
        prices.fwd(fwd),
        prices.back("dgrad", dgrad, ready=rules is not None),
        prices.back("wgrad", wgrad, ready=rules is not None),
        prices.gradient(rules),
    ]
    found = [cost.us for cost in parts if cost is not None and cost.us is not None]
    if len(found) < len(parts):
        raise ValueError(f"no price for some part of {kernels}")
    return sum(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device("cuda")
    rows: list[dict[str, Any]] = []
    regrets = []
    for shape in SHAPES:
        form = Epilogue(256, "hard_swish", gain=True)
        bare = GemmShape(*shape, str(form))
        prices = SitePrices(Place(bare, torch.bfloat16, device, epilogue=str(form)), tune="auto")
        mine = []
        for kernels in KERNELS:
            measured, priced = step_us(shape, form, kernels), priced_us(prices, kernels)
            mine.append((priced, measured))
            row = dict(zip(("M", "K", "N"), shape, strict=True), kernels=list(kernels))
            rows.append({**row, "measured_us": measured, "priced_us": priced})
            print(*shape, *kernels, f"{measured:.1f} measured, {priced:.1f} priced", flush=True)
        best = min(us for _, us in mine)
        regrets.append(100 * (min(mine)[1] / best - 1))
    off = [abs(r["priced_us"] / r["measured_us"] - 1) for r in rows]
    result = {
        "env": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": _compat.device_key(device),
            "date": datetime.now(timezone.utc).date().isoformat(),
        },
        "median_off_percent": 100 * statistics.median(off),
        "worst_off_percent": 100 * max(off),
        "mean_regret_percent": statistics.fmean(regrets),
        "max_regret_percent": max(regrets),
        "rows": rows,
    }
    write_text(args.out, json.dumps(result, indent=1) + "\n")
    print({k: v for k, v in result.items() if k not in ("env", "rows")})


if __name__ == "__main__":
    main()
