"""Operands and a small tile for tests of the fused forward, on a GPU and in the interpreter."""

from __future__ import annotations

import pytest
import torch

from loka_compile.kernels.quantize import quantize_rowwise
from loka_compile.kernels.quantize import quantize_tensorwise
from loka_compile.kernels.tiles import Config

E4M3 = torch.float8_e4m3fn
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# Compiled FP8 products need a K step of at least 32 and 64 rows for the tensor cores.
SMALL = Config(64, 128, 1, 4, 3) if ON_GPU else Config(32, 32, 1, 4, 2)
# Against FP64 of the same FP8 operands: FP32 order of sums; fast accumulation keeps 13 bits.
TOLERANCE = 2e-3 if ON_GPU else 1e-6

needs_descriptors = pytest.mark.skipif(
    ON_GPU and torch.cuda.get_device_capability() < (9, 0), reason="tensor descriptors need sm90"
)


def operands(m: int, k: int, n: int, rows: bool = False):
    quantize = quantize_rowwise if rows else quantize_tensorwise
    a, a_scale = quantize(torch.randn(m, k, device=DEVICE), E4M3)
    w, w_scale = quantize(torch.randn(n, k, device=DEVICE) * 0.1, E4M3)
    return a, a_scale, w, w_scale


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def split(count: int) -> Config:
    return Config(SMALL.block_m, SMALL.block_k, count, SMALL.warps, SMALL.stages)
