r"""FP8 in both orientations from one read, against the same formulas compiled by Inductor.

    python benchmarks/bench_quantize.py --out benchmarks/results/quantize_h200.json

Medians under CUDA-graph replay, microseconds, one process. Matrices are bf16: weights (N, K), and
activations or gradients (M, C). Kinds: scale as it lies / scale of the transpose.
    kernel_us    `kernels.quantize_both`; of rows alone `kernels.quantize_rows`
    steps_us     `kernels.orientations.quantize_both_ref` compiled by Inductor: same bytes
    floor_us     bytes over the copy bandwidth of the same run: one read, one or two FP8 writes
`equal`: the two gave the same bytes and scales.

Other processes compile beforehand, side by side, into Inductor's cache: timing needs the device to
itself, compiling does not.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import torch
import triton
from bench_fused_backward import copy_gb_s
from bench_fused_backward import time_us

from loka_compile import _compat
from loka_compile.kernels.orientations import Both
from loka_compile.kernels.orientations import Scale
from loka_compile.kernels.orientations import quantize_both_ref
from loka_compile.kernels.quantize_both import quantize_both
from loka_compile.kernels.quantize_rows import quantize_rows

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: Weights of recommenders, then activations.
SHAPES = [
    (256, 256), (512, 512), (256, 7680), (2048, 2048), (2048, 4096), (4096, 4096), (2048, 8256),
    (1024, 2048), (1024, 7680), (4096, 2048), (16384, 2048), (16384, 4096),
]  # fmt: skip
PAIRS: dict[str, tuple[Scale, Scale | None]] = {
    "tensor / tensor": (Scale("tensor"), Scale("tensor")),
    "row / row": (Scale("row"), Scale("row")),
    "1x128 / 1x128, turned": (
        Scale("1x128", turned=True, multiple=4),
        Scale("1x128", turned=True, multiple=4),
    ),
    "128x128 / 128x128": (Scale("128x128"), Scale("128x128")),
    "static / static": (Scale("static"), Scale("static")),
    # One launch, in which a row stays in registers.
    "row / none": (Scale("row"), None),
}


def same(got: Any, want: Any) -> bool:
    for name in ("q", "scale", "qt", "scale_t"):
        a, b = getattr(got, name), getattr(want, name)
        if a is b is None:
            continue
        # A scale of the whole tensor has no dimension, and cannot be seen as bytes.
        a, b = (t.contiguous().flatten().view(torch.uint8) for t in (a, b))
        if not torch.equal(a, b):
            return False
    return True


def compiled(x: torch.Tensor, pair: str, static: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    """The formulas by Inductor, ready to run."""
    torch._dynamo.reset()

    def formulas(x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        out = quantize_both_ref(x, *PAIRS[pair], static=static)
        return out.q, out.scale, out.qt, out.scale_t

    steps: Callable[[torch.Tensor], Any] = torch.compile(formulas, dynamic=False)
    steps(x)
    return steps


def compile_part(part: int, parts: int, device: torch.device) -> None:
    """Every `parts`-th of all cases, for those who come after."""
    static = torch.full((), 0.0123, device=device)
    for r, c in SHAPES:
        for pair in list(PAIRS)[part::parts]:
            compiled(torch.randn(r, c, device=device, dtype=torch.bfloat16), pair, static)


def compile_all() -> None:
    parts = len(PAIRS)
    command = [sys.executable, __file__, "--out", "-", "--part"]
    running = [subprocess.Popen([*command, str(i)]) for i in range(parts)]
    if sum(one.wait() != 0 for one in running):
        raise SystemExit("a process that compiles failed: see above")


def measure(r: int, c: int, pair: str, bandwidth: float, device: torch.device) -> dict[str, Any]:
    x = torch.randn(r, c, device=device, dtype=torch.bfloat16)
    rules = PAIRS[pair]
    static = torch.full((), 0.0123, device=device)

    def kernel() -> Both:
        if rules[1] is None:
            return Both(*quantize_rows(x))
        return quantize_both(x, *rules, static=static)

    steps = compiled(x, pair, static)
    writes = sum(rule is not None for rule in rules)
    return {
        "R": r,
        "C": c,
        "scales": pair,
        "kernel_us": time_us(kernel),
        "steps_us": time_us(lambda: steps(x)),
        "floor_us": (x.nbytes + writes * r * c) / bandwidth * 1e-3,
        "equal": same(kernel(), quantize_both_ref(x, *rules, static=static)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = torch.device("cuda")
    if args.part is not None:
        compile_part(args.part, len(PAIRS), device)
        return
    compile_all()
    bandwidth = copy_gb_s(device)
    rows = []
    for r, c in SHAPES:
        for pair in PAIRS:
            rows.append(measure(r, c, pair, bandwidth, device))
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
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
