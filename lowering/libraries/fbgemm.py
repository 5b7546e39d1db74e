"""FBGEMM GenAI: CUTLASS kernels (row, tensor, block and group scales) and its Triton row kernel.

All take A (M, K) and B (N, K) row-major, write bf16, and know e4m3 only (the Triton kernel takes
what Triton takes). Its quantisers are not used: ours fuse into what comes before them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loka_compile.kernels.quantize_blockwise import fill
from loka_compile.lowering.libraries import opaque
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.libraries.optional import OptionalLibrary
from loka_compile.lowering.libraries.optional import load
from loka_compile.lowering.recipes import BLOCKWISE_128X128
from loka_compile.lowering.recipes import GROUPWISE
from loka_compile.lowering.recipes import ROWWISE
from loka_compile.lowering.recipes import ROWWISE_FAST
from loka_compile.lowering.recipes import ROWWISE_SLOW
from loka_compile.lowering.recipes import TENSORWISE_E4M3
from loka_compile.lowering.recipes import Gemm
from loka_compile.lowering.recipes import Granularity

_MODULE = "fbgemm_gpu.experimental.gen_ai"
_TRITON_MODULE = "fbgemm_gpu.experimental.gemm.triton_gemm.fp8_gemm"
_INT32 = 2**31


class FBGEMM(OptionalLibrary):
    name = "fbgemm"
    distribution = "fbgemm-gpu-genai"
    module = _MODULE
    majors = (9,)
    recipes = {
        r.name: r
        for r in (
            ROWWISE,
            ROWWISE_FAST,
            ROWWISE_SLOW,
            TENSORWISE_E4M3,
            GROUPWISE,
            BLOCKWISE_128X128,
        )
    }

    def kernel_dtype(self, gemm: Gemm, out_dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16

    def prepare(
        self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, gemm: Gemm
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if gemm.a.granularity is Granularity.BLOCK:
            return a, a_scale.contiguous(), b, b_scale.contiguous()
        if gemm.b.blocks:
            if not gemm.a.blocks:
                a_scale = a_scale.expand(a.shape[0], (a.shape[1] + 127) // 128)
            return a, a_scale.t().contiguous(), b, b_scale.t().contiguous()
        if gemm.b.rows:
            return a, a_scale.expand(a.shape[0], 1).reshape(-1), b, b_scale.reshape(-1)
        return a, a_scale.reshape(1), b, b_scale.reshape(1)

    def call(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        gemm: Gemm,
        out_dtype: torch.dtype,
    ) -> Tensor:
        op: Any
        extra: tuple[bool, ...]
        if gemm.b.rows:
            op, extra = torch.ops.loka.gemm_fbgemm_rows, (gemm.fast_accum,)
        elif not gemm.b.blocks:
            op, extra = torch.ops.loka.gemm_fbgemm_tensor, (gemm.fast_accum,)
        elif gemm.a.granularity is Granularity.BLOCK:
            op, extra = torch.ops.loka.gemm_fbgemm_blocks, ()
        else:
            op, extra = torch.ops.loka.gemm_fbgemm_groups, ()
        return op(a, a_scale, b, b_scale, *extra).to(out_dtype)


class FBGEMMTriton(OptionalLibrary):
    """Its first call at a shape times its configurations, which takes from a second to a minute."""

    tunes_itself = True
    name = "fbgemm_triton"
    distribution = "fbgemm-gpu-genai"
    module = _TRITON_MODULE
    majors = (9,)
    recipes = {ROWWISE.name: ROWWISE, ROWWISE_FAST.name: ROWWISE_FAST}

    def why_not(self, recipe: str, direction: str, shape: GemmShape) -> str | None:
        largest = max(shape.m * shape.k, shape.n * shape.k, shape.m * shape.n)
        if largest >= _INT32:
            return f"an operand of {largest} values is past its 32-bit offsets"
        return super().why_not(recipe, direction, shape)

    def kernel_dtype(self, gemm: Gemm, out_dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16

    def prepare(
        self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, gemm: Gemm
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return a, a_scale.expand(a.shape[0], 1).reshape(-1), b, b_scale.reshape(-1)

    def call(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        gemm: Gemm,
        out_dtype: torch.dtype,
    ) -> Tensor:
        out = torch.ops.loka.gemm_fbgemm_triton(a, a_scale, b, b_scale, gemm.fast_accum)
        return out.to(out_dtype)


def _op(name: str):
    load(_MODULE)
    return getattr(torch.ops.fbgemm, name)


def _rows(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, fast: bool) -> Tensor:
    """a_scale (M,), b_scale (N,)."""
    return _op("f8f8bf16_rowwise")(a, b, a_scale, b_scale, use_fast_accum=fast)


def _tensor(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, fast: bool) -> Tensor:
    """a_scale (1,), b_scale (1,): the kernel takes their product, on the device."""
    return _op("f8f8bf16")(a, b, (a_scale * b_scale).reshape(()), use_fast_accum=fast)


def _blocks(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """a_scale (blocks of M, blocks of K), b_scale (blocks of N, blocks of K)."""
    return _op("f8f8bf16_blockwise")(a, b, a_scale, b_scale, 128, 128, 128)


def _groups(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """a_scale (groups of K, M), b_scale (groups of K, blocks of N).

    A's scales are read by TMA, whose rows are multiples of 16 bytes: at any other M the kernel runs
    into an illegal instruction, which ends the CUDA context.
    """
    m = a.shape[0]
    out = _op("f8f8bf16_groupwise")(fill(a, 4, 1), b, fill(a_scale, 1, 4), b_scale)
    return out if out.shape[0] == m else out[:m].contiguous()


def _triton(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, fast: bool) -> Tensor:
    # The TMA path needs parts of Triton that are gone in 3.6.
    return load(_TRITON_MODULE).matmul_fp8_row(
        a, b, a_scale, b_scale, fp8_fast_accum=fast, tma_persistent=False
    )


def _bf16(*_: object) -> torch.dtype:
    return torch.bfloat16


opaque.define("gemm_fbgemm_rows", "bool fast", _rows, _bf16)
opaque.define("gemm_fbgemm_tensor", "bool fast", _tensor, _bf16)
opaque.define("gemm_fbgemm_blocks", "", _blocks, _bf16)
opaque.define("gemm_fbgemm_groups", "", _groups, _bf16)
opaque.define("gemm_fbgemm_triton", "bool fast", _triton, _bf16)
