r"""All weights of Wukong base as FP8 in both orientations: one op for all against one for each.

    python benchmarks/bench_weights.py --out benchmarks/results/weights_h200.json

Weights are those of a training step that go to FP8, bf16 or FP32 that is rounded to bf16 on the
way, as under autocast. Scales of both orientations are of one kind. Microseconds, medians:
    device_us   under CUDA-graph replay
    host_us     to start it all, without waiting for the device
    floor_us    bytes over the copy bandwidth of the same run: two reads (of all values for their
                maxima, then of a tile; block scales: one), two FP8 writes
`equal`: both gave the same bytes.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import torch
import triton
from bench_fused_backward import copy_gb_s
from bench_fused_backward import time_us
from torch import Tensor
from torch import nn

from loka_compile import _compat
from loka_compile.kernels import weight_group
from loka_compile.kernels.orientations import Scale
from loka_compile.kernels.quantize_both import quantize_both
from loka_compile.kernels.quantize_weights import quantize_weights
from loka_compile.kernels.quantize_weights import sizes_of
from loka_compile.zoo.wukong import SCALES
from loka_compile.zoo.wukong import WukongDense

KINDS = ("tensor", "row", "128x128")
#: Narrower ones stay in high precision.
_LEAST = 256
_CALLS, _REPEATS = 20, 15


def shapes() -> list[tuple[int, int]]:
    with torch.device("meta"):
        model = WukongDense(SCALES["base"], n_embeddings=124, n_dense=16)
    found = [tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear)]
    return [(n, k) for n, k in found if min(n, k) >= _LEAST]


def host_us(call: Callable[[], Any]) -> float:
    call()
    found = []
    for _ in range(_REPEATS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(_CALLS):
            call()
        found.append((time.perf_counter() - begun) / _CALLS * 1e6)
    return statistics.median(found)


def measure(ws: list[Tensor], kind: str, bandwidth: float) -> dict[str, Any]:
    asked = tuple(weight_group.Asked(Scale(kind), Scale(kind)) for _ in ws)
    sizes, dtype = sizes_of(ws), torch.bfloat16

    def together() -> tuple[Tensor, Tensor, Tensor]:
        return quantize_weights(ws, asked, dtype, sizes)

    def each() -> list[Any]:
        return [
            quantize_both(w, a.straight, a.turned, rows_up=True, columns_up=True, dtype=dtype)
            for w, a in zip(ws, asked, strict=True)
        ]

    q, qt, scales = together()
    places = weight_group.layout(tuple(tuple(w.shape) for w in ws), asked).places
    equal = all(
        torch.equal(p.of(to).float(), part.float())
        for one, four in zip(each(), places, strict=True)
        for p, to, part in zip(four, (q, scales, qt, scales), vars(one).values(), strict=True)
    )
    reads = 1 if kind == "128x128" else 2
    moved = sum(reads * w.nbytes + 2 * w.numel() for w in ws)
    return {
        "dtype": str(ws[0].dtype).removeprefix("torch."),
        "scales": kind,
        "weights": len(ws),
        "values": sum(w.numel() for w in ws),
        "together_device_us": time_us(together),
        "each_device_us": time_us(each),
        "together_host_us": host_us(together),
        "each_host_us": host_us(each),
        "floor_us": moved / bandwidth * 1e-3,
        "equal": equal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device("cuda")
    torch.manual_seed(0)
    bandwidth = copy_gb_s(device)
    rows = []
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32):
            ws = [torch.randn(s, device=device).to(dtype) / 50 for s in shapes()]
            for kind in KINDS:
                rows.append(measure(ws, kind, bandwidth))
                shown = {k: round(v, 1) if isinstance(v, float) else v for k, v in rows[-1].items()}
                print(shown, flush=True)
    result = {
        "env": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "device": _compat.device_key(device),
            "date": datetime.now(timezone.utc).date().isoformat(),
        },
        "copy_gb_s": bandwidth,
        "shapes": shapes(),
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
