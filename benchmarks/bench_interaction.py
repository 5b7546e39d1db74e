r"""Products of a factorisation machine and a linear compression: one kernel against separate ones.

    python benchmarks/bench_interaction.py --out benchmarks/results/interaction_h200.json

Microseconds, median under CUDA-graph replay, bf16. `separate` are the batched products as they run
without the kernel (three forward; seven and their sums, compiled, backward). `floor` is the bytes
that must move (x read once each way, results and gradients written once) over the bandwidth of a
copy measured in the same run. --sweep times launch configurations and prints the best.
"""

from __future__ import annotations

import argparse
import itertools
import json
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import torch

from loka_compile import _compat
from loka_compile.files import write_text
from loka_compile.kernels.interaction import interaction
from loka_compile.kernels.interaction import interaction_backward
from loka_compile.lowering.interaction import interaction_backward_ref
from loka_compile.lowering.interaction import interaction_ref
from loka_compile.train.environment import versions

#: (B, n, d, k, m): Wukong base and small, and sizes that are no power of two.
SHAPES = [(4096, 128, 128, 32, 64), (16384, 64, 64, 24, 32), (1024, 128, 128, 32, 64),
          (4096, 100, 96, 24, 40)]  # fmt: skip
DTYPE = torch.bfloat16


def time_us(run: Any) -> float:
    from triton.testing import do_bench_cudagraph

    return do_bench_cudagraph(run, rep=20, return_mode="median") * 1e3


def bandwidth(device: torch.device) -> float:
    """Bytes per microsecond of a copy of 256 MiB, read and written."""
    a = torch.empty(2**28, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * a.numel() / time_us(lambda: b.copy_(a))


def operands(b: int, n: int, d: int, k: int, m: int, device: torch.device) -> tuple[Any, ...]:
    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(DTYPE)

    return made(b, n, d), made(k, n).t(), made(m, n), made(b, n, k), made(b, m, d)


def floors(b: int, n: int, d: int, k: int, m: int) -> tuple[int, int]:
    """Bytes forward and backward."""
    x, results = 2 * b * n * d, 2 * b * (n * k + m * d)
    return x + results, 2 * x + results


def sweep(x: Any, p: Any, left: Any, gfm: Any, gc: Any) -> None:
    for name, run in (
        ("forward", lambda **c: interaction(x, p, left, **c)),
        ("backward", lambda **c: interaction_backward(gfm, gc, x, p, left, **c)),
    ):
        found = []
        for warps, stages, programs in itertools.product((4, 8), (1, 2, 3), (1, 2, 3)):
            config = {"programs": programs, "warps": warps, "stages": stages}
            try:
                found.append((time_us(lambda c=config: run(**c)), config))  # noqa: B023
            except Exception as error:
                print(name, config, str(error).splitlines()[0][:80])
        for us, config in sorted(found, key=lambda f: f[0])[:5]:
            print(name, tuple(x.shape), round(us, 1), config, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda")
    rate = bandwidth(device)
    backward = torch.compile(interaction_backward_ref, dynamic=False)
    rows = []
    for shape in SHAPES:
        x, p, left, gfm, gc = operands(*shape, device)
        if args.sweep and shape == SHAPES[0]:
            sweep(x, p, left, gfm, gc)
        forward_floor, backward_floor = floors(*shape)
        want = interaction_backward_ref(*(t.float() for t in (gfm, gc, x, p, left)))
        got = interaction_backward(gfm, gc, x, p, left)
        error = max(
            float((a.float() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)
        )
        del want, got
        rows.append(
            {
                **dict(zip(("B", "n", "d", "k", "m"), shape, strict=True)),
                "forward_us": time_us(lambda: interaction(x, p, left)),  # noqa: B023
                "forward_separate_us": time_us(lambda: interaction_ref(x, p, left)),  # noqa: B023
                "forward_floor_us": forward_floor / rate,
                "backward_us": time_us(lambda: interaction_backward(gfm, gc, x, p, left)),  # noqa: B023
                "backward_separate_us": time_us(lambda: backward(gfm, gc, x, p, left)),  # noqa: B023
                "backward_floor_us": backward_floor / rate,
                "rel_error": error,
            }
        )
        print(json.dumps({k: round(v, 4) for k, v in rows[-1].items()}), flush=True)
    if args.out is not None:
        env = {**versions(device), "device": _compat.device_key(device), "copy_bytes_per_us": rate}
        env["date"] = datetime.now(timezone.utc).date().isoformat()
        write_text(args.out, json.dumps({"env": env, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
