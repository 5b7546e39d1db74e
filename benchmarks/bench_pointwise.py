r"""Exact epilogues in our FP8 GEMM: bias and activation, residual, ensemble sum, DCN-V2's cross.

    python benchmarks/bench_pointwise.py --out benchmarks/results/pointwise_h200.json

Medians under CUDA-graph replay, microseconds, one process; bf16 in and out, FP8 operands ready:
    bf16_us    torch.compile of the linear and its epilogue in bf16
    steps_us   torch.compile of `torch._scaled_mm` (tensorwise, fast accumulation) and the epilogue
    fused_us   one kernel, the tile that the package picks; tuned_us: the fastest of all tiles
    rel_error  of the fused result against FP64 on the same FP8 operands
"""

from __future__ import annotations

import argparse
import json
import platform
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import torch
import triton
from bench_fused_forward import best
from bench_fused_forward import time_us
from torch.nn import functional as F

from loka_compile import _compat
from loka_compile.kernels.fused_forward import fused_forward
from loka_compile.kernels.fused_forward import fused_forward_ref
from loka_compile.kernels.quantize import quantize_tensorwise
from loka_compile.kernels.tiles import candidates
from loka_compile.kernels.tiles import pointwise_block
from loka_compile.kernels.tiles import programs_of

E4M3 = torch.float8_e4m3fn
#: form -> (K, N): towers and cross layers of DCN-V2 (D = 3456: 27 embeddings of 128), an ensemble
#: layer of DHEN, a residual.
CASES = {
    "bias + relu": [(3456, 1024), (1024, 1024), (1024, 512)],
    "bias + silu": [(2048, 2048)],
    "bias + factor + addend": [(3456, 3456), (512, 3456), (2048, 2048)],
    "bias + scale + addend": [(1024, 2048)],
    "addend": [(2048, 2048)],
}
_ACTS = {"relu": torch.relu, "silu": F.silu}


def epilogue(form: str, t: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    t = t * parts["mul"] if "mul" in parts else t
    t = t + parts["addend"] if "addend" in parts else t
    return _ACTS.get(form.rsplit(" + ", 1)[-1], lambda v: v)(t)


def measure(form: str, m: int, k: int, n: int, device: torch.device) -> dict[str, Any]:
    torch._dynamo.reset()
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    w = torch.randn(n, k, device=device, dtype=torch.bfloat16) / k**0.5
    a, a_scale = quantize_tensorwise(x, E4M3)
    b, b_scale = quantize_tensorwise(w, E4M3)
    parts: dict[str, torch.Tensor] = {}
    names = form.split(" + ")
    if "bias" in names:
        parts["bias"] = torch.randn(n, device=device, dtype=torch.bfloat16)
    if "factor" in names:
        parts["mul"] = torch.randn(m, n, device=device, dtype=torch.bfloat16)
    if "scale" in names:
        parts["mul"] = torch.tensor(0.3, device=device, dtype=torch.bfloat16)
    if "addend" in names:
        parts["addend"] = torch.randn(m, n, device=device, dtype=torch.bfloat16)

    def high() -> torch.Tensor:
        return epilogue(form, F.linear(x, w, parts.get("bias")), parts)

    def steps() -> torch.Tensor:
        t = torch._scaled_mm(
            a, b.t(), a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return epilogue(form, t + parts["bias"] if "bias" in parts else t, parts)

    act = names[-1] if names[-1] in _ACTS else "none"
    call: dict[str, Any] = {"block": pointwise_block(n), "norm": False, "act": act, **parts}
    compiled = [torch.compile(f, dynamic=False) for f in (high, steps)]
    tried = candidates(m, n, k, call["block"], programs_of(device))
    row: dict[str, Any] = {"form": form, "M": m, "K": k, "N": n}
    with torch.no_grad():
        row["bf16_us"], row["steps_us"] = (time_us(f) for f in compiled)
        row["fused_us"] = time_us(lambda: fused_forward(a, a_scale, b, b_scale, **call))
        row["tuned_us"], config = best(
            lambda c: fused_forward(a, a_scale, b, b_scale, config=c, **call), tried
        )
        row["config"] = vars(config)
        got = fused_forward(a, a_scale, b, b_scale, **call).y.double()
        want, _, _ = fused_forward_ref(a, a_scale, b, b_scale, **call)
        row["rel_error"] = float((got - want).norm() / want.norm())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--m", type=int, nargs="+", default=[1024, 4096, 16384])
    args = parser.parse_args()
    device = torch.device("cuda")
    rows = []
    for form, shapes in CASES.items():
        for k, n in shapes:
            for m in args.m:
                rows.append(measure(form, m, k, n, device))
                shown = {key: round(v, 2) for key, v in rows[-1].items() if isinstance(v, float)}
                print(form, m, k, n, shown, rows[-1]["config"], flush=True)
    result = {
        "env": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "device": _compat.device_key(device),
            "date": datetime.now(timezone.utc).date().isoformat(),
        },
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
