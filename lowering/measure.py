"""Latency of one kernel at one shape, quantise and layout included, under CUDA-graph replay.

Rows are kept for the life of the process, keyed by device, versions, direction, kernel, shape and
dtype. Without CUDA there is nothing to time: FP8 on a CPU is emulation.
"""

from __future__ import annotations

import functools
import statistics

import torch

from loka_compile.lowering import gemm
from loka_compile.lowering.libraries.base import GemmShape

REPEATS = 5


@functools.lru_cache(maxsize=4096)
def latency_us(
    direction: str, kernel: str, shape: GemmShape, dtype: torch.dtype, device: torch.device
) -> float | None:
    """Median microseconds of the compiled kernel; None when it cannot be timed on `device`."""
    if device.type != "cuda":
        return None
    from triton.testing import do_bench_cudagraph

    m, k, n = shape.m, shape.k, shape.n
    x = torch.randn(m, k, device=device).to(dtype)
    w = torch.randn(n, k, device=device).to(dtype)
    gy = torch.randn(m, n, device=device).to(dtype)
    function, a, b = {
        "fwd": (gemm.forward, x, w),
        "dgrad": (gemm.dgrad, gy, w),
        "wgrad": (gemm.wgrad, gy, x),
    }[direction]
    compiled = torch.compile(functools.partial(function, kernel=kernel), dynamic=False)
    with torch.no_grad():
        compiled(a, b)
        # One repeat is a mean over many replays already; the median takes out a disturbed one.
        times = [do_bench_cudagraph(lambda: compiled(a, b), rep=5) for _ in range(REPEATS)]
    return statistics.median(times) * 1e3
