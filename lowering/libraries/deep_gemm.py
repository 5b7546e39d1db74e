"""DeepGEMM: 1 x 128 by 128 x 128 (forward, dgrad; bf16) and 1 x 128 by 1 x 128 (wgrad; fp32).

Each kernel is compiled by its own JIT when a class of shapes is first used, with the CUDA compiler
found through CUDA_HOME: warm it up before a CUDA graph is captured.
"""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from loka_compile.kernels.quantize_blockwise import fill
from loka_compile.lowering.libraries import opaque
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.libraries.optional import OptionalLibrary
from loka_compile.lowering.libraries.optional import load
from loka_compile.lowering.recipes import BLOCKWISE
from loka_compile.lowering.recipes import Gemm
from loka_compile.lowering.recipes import Granularity

_MODULE = "deep_gemm"
#: For as many rows or fewer it takes tiles of 16 or 32, which its 1 x 128 by 1 x 128 kernel does
#: not compile with.
_FEW_ROWS = 32


class DeepGEMM(OptionalLibrary):
    name = "deep_gemm"
    distribution = "sgl-deep-gemm"
    module = _MODULE
    # Its Blackwell kernels take packed scales, which this adapter does not make.
    majors = (9,)
    recipes = {BLOCKWISE.name: BLOCKWISE}

    def why_unavailable(self, device: torch.device) -> str | None:
        why = super().why_unavailable(device)
        return _why_no_workspace(device) if why is None else why

    def why_environment(self) -> str | None:
        if any(os.environ.get(v) for v in ("CUDA_HOME", "CUDA_PATH")) or shutil.which("nvcc"):
            return None
        if Path("/usr/local/cuda").exists():
            return None
        return (
            "sgl-deep-gemm needs a CUDA home for its compiler (set CUDA_HOME; with pip alone: "
            "install nvidia-cuda-nvcc and point it at site-packages/nvidia/cu13)"
        )

    def why_not(self, recipe: str, direction: str, shape: GemmShape) -> str | None:
        why = super().why_not(recipe, direction, shape)
        gemm = self.recipes[recipe].gemm(direction)
        adds = gemm is not None and gemm.b.granularity is Granularity.GROUP
        if why is None and adds and shape.n <= _FEW_ROWS:
            return f"N = {shape.n}: its kernel for {direction} has no tile of {_FEW_ROWS} rows"
        return why

    def kernel_dtype(self, gemm: Gemm, out_dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if gemm.b.granularity is Granularity.GROUP else torch.bfloat16

    def prepare(
        self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, gemm: Gemm
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if not gemm.a.blocks:
            a_scale = a_scale.expand(a.shape[0], (a.shape[1] + 127) // 128)
        # Groups of the contraction outermost, each row of scales 16-byte aligned: what its kernel
        # reads by TMA, and what it would otherwise make by a launch of its own.
        a_scale = fill(a_scale.t(), 1, 4)
        if gemm.b.granularity is Granularity.GROUP:
            b_scale = fill(b_scale.t(), 1, 4)
        return a, a_scale.contiguous(), b, b_scale.contiguous()

    def call(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        gemm: Gemm,
        out_dtype: torch.dtype,
    ) -> Tensor:
        if gemm.b.granularity is Granularity.GROUP:
            op = torch.ops.loka.gemm_deep_gemm_1d1d
        else:
            op = torch.ops.loka.gemm_deep_gemm_1d2d
        return op(a, a_scale, b, b_scale).to(out_dtype)


@functools.cache
def _why_no_workspace(device: torch.device) -> str | None:
    """It allocates a workspace for good at its first call: not while a CUDA graph is recorded, to
    whose memory that would then belong."""
    try:
        with torch.cuda.device(device):
            load(_MODULE).get_num_sms()
    except Exception as error:
        return f"sgl-deep-gemm does not start: {type(error).__name__}: {error}"
    return None


def _by_row(scale: Tensor, rows: int) -> Tensor:
    """(groups, rows rounded up to 4) -> (rows, groups) with the rows next to each other."""
    return scale[:, :rows].t()


def _1d2d(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """a_scale (groups of K, M rounded up to 4), b_scale (blocks of N, blocks of K) -> bf16."""
    out = a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)
    load(_MODULE).fp8_gemm_nt(
        (a, _by_row(a_scale, a.shape[0])), (b, b_scale), out, recipe=(1, 128, 128)
    )
    return out


def _1d1d(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """a_scale (groups of K, M rounded up to 4), b_scale (groups of K, N rounded up to 4) -> fp32.

    The kernel adds to what it is given.
    """
    out = a.new_zeros((a.shape[0], b.shape[0]), dtype=torch.float32)
    load(_MODULE).fp8_gemm_nt(
        (a, _by_row(a_scale, a.shape[0])),
        (b, _by_row(b_scale, b.shape[0])),
        out,
        c=out,
        recipe=(1, 1, 128),
    )
    return out


opaque.define("gemm_deep_gemm_1d2d", "", _1d2d, lambda: torch.bfloat16)
opaque.define("gemm_deep_gemm_1d1d", "", _1d1d, lambda: torch.float32)
