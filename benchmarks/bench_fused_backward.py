r"""The backward of a fused chain on its own: activation and BlockNorm gradient, FP8 both ways.

    python benchmarks/bench_fused_backward.py --out benchmarks/results/backward_h200.json

All times are medians under CUDA-graph replay, in microseconds, taken in one process:
    fused_us        both kernels (amax, then quantise), tensorwise e5m2
    fused_rows_us   the same with one scale per row and per column, e4m3
    fused_blocks_us the one kernel that reads once: a scale per 1 x 128 values, e4m3
    steps_us        what it replaces: the same formula and casts compiled by Inductor
    floor_us        bytes / copy bandwidth; bytes: dL/dy and u read once, r, both FP8 results
    two_reads_us    the same with dL/dy and u read twice, as the two kernels do
    stream_us       a kernel that moves the bytes of floor_us, r aside, and computes nothing
`copy_gb_s` is the best bandwidth of a device copy in the same process, of several sizes: one of
1 GiB takes half as long again per byte as one of 256 MiB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
from collections.abc import Callable
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.testing import do_bench_cudagraph

from loka_compile import _compat
from loka_compile.kernels import block_norm as bn
from loka_compile.kernels.fused_backward import fused_backward
from loka_compile.kernels.fused_backward_blocks import fused_backward_blocks
from loka_compile.kernels.orientations import Scale
from loka_compile.lowering.chain_backward import fused_chain_backward_ref
from loka_compile.lowering.cost_table import version_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = list(itertools.product((4096, 8192, 16384), (2048, 4096)))
TENSOR = (False, E5M2, False, E5M2)
ROWS = (True, E4M3, True, E4M3)
#: As DeepGEMM reads its first operand.
DEEP = Scale("1x128", turned=True, multiple=4)
REPEATS = 3


def time_us(run: Callable[[], Any], rep: int = 5) -> float:
    return statistics.median(do_bench_cudagraph(run, rep=rep) for _ in range(REPEATS)) * 1e3


def copy_gb_s(device: torch.device) -> float:
    """Of sizes beyond what L2 holds; by the driver's copy, and by a kernel of torch's."""
    found = []
    for size in (2**28, 2**29, 2**30):
        a = torch.empty(size // 4, dtype=torch.float32, device=device)
        b = torch.empty_like(a)
        for run in (lambda: b.copy_(a), lambda: torch.neg(a, out=b)):  # noqa: B023
            found.append(2 * size / time_us(run, rep=20) * 1e-3)
    return max(found)


@triton.jit
def _stream_kernel(gy_ptr, u_ptr, q_ptr, qt_ptr, count, BLOCK: tl.constexpr):
    for part in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = part.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        gy = tl.load(gy_ptr + at, eviction_policy="evict_first")
        both = gy ^ tl.load(u_ptr + at, eviction_policy="evict_first")
        tl.store(q_ptr + at, both.to(tl.int8))
        tl.store(qt_ptr + at, (both >> 8).to(tl.int8))


def stream_us(gy: torch.Tensor, u: torch.Tensor) -> float:
    """The best of several grids."""
    a, b = gy.view(torch.int16), u.view(torch.int16)
    q = torch.empty(gy.shape, dtype=torch.int8, device=gy.device)
    qt = torch.empty_like(q)
    sms = torch.cuda.get_device_properties(gy.device).multi_processor_count

    def run(programs: int) -> None:
        _stream_kernel[(programs * sms,)](a, b, q, qt, a.numel(), BLOCK=2048, num_warps=4)

    return min(time_us(lambda p=programs: run(p)) for programs in (4, 8, 16))


def measure(m: int, n: int, bandwidth: float, device: torch.device, sweep: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    block = bn.block_of(n)
    z = torch.randn(m, n, device=device)
    u, r = bn.normalize(z, block, 1e-6)
    u, gy = u.bfloat16(), torch.randn(m, n, device=device).bfloat16()
    steps = torch.compile(fused_chain_backward_ref, dynamic=False)
    args = (gy, u, r, None, block, "hard_swish", False)
    reads, writes = gy.nbytes + u.nbytes + r.nbytes, 2 * m * n
    row: dict[str, Any] = {"M": m, "N": n, "block": block, "bytes": reads + writes}
    row["fused_us"] = time_us(lambda: fused_backward(*args, *TENSOR))
    row["fused_rows_us"] = time_us(lambda: fused_backward(*args, *ROWS))
    row["fused_blocks_us"] = time_us(lambda: fused_backward_blocks(*args, DEEP, DEEP))
    row["steps_us"] = time_us(lambda: steps(*args, *TENSOR))
    row["floor_us"] = (reads + writes) / bandwidth * 1e-3
    row["two_reads_us"] = (2 * reads + writes) / bandwidth * 1e-3
    row["stream_us"] = stream_us(gy, u)
    if sweep:
        for size, lines in itertools.product((16, 32), (2, 4, 8)):
            us = time_us(lambda s=size, i=lines: fused_backward(*args, *TENSOR, block_m=s, lines=i))
            print(f"  {m}x{n} block_m={size} lines={lines}: {us:.1f}", flush=True)
        for warps in (4, 8):
            us = time_us(lambda w=warps: fused_backward_blocks(*args, DEEP, DEEP, warps=w))
            print(f"  {m}x{n} blocks: warps={warps}: {us:.1f}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sweep", action="store_true", help="also print other tile sizes")
    args = parser.parse_args()
    device = torch.device("cuda")
    bandwidth = copy_gb_s(device)
    rows = []
    for m, n in SHAPES:
        rows.append(measure(m, n, bandwidth, device, args.sweep and m == 4096))
        shown = {k: round(v, 1) if isinstance(v, float) else v for k, v in rows[-1].items()}
        print(shown, flush=True)
    result = {
        "env": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "device": _compat.device_key(device),
            "own": version_of("loka", "gradient"),
            "date": datetime.now(timezone.utc).date().isoformat(),
        },
        "copy_gb_s": bandwidth,
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
