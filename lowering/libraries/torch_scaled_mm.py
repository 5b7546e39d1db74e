"""`torch._scaled_mm` (tensorwise, rowwise) and its second version (block scales, Hopper only).

cuBLASLt on Hopper; a reference kernel on CPU for the first two recipes. The first version's
128 x 128 scales have a layout that is not cuBLASLt's where ceil(K / 128) is no multiple of 4, so
block scales go through the second, which takes the padded one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.kernels.quantize_blockwise import fill
from loka_compile.lowering.libraries import opaque
from loka_compile.lowering.libraries.base import Library
from loka_compile.lowering.recipes import BLOCKWISE
from loka_compile.lowering.recipes import ROWWISE
from loka_compile.lowering.recipes import TENSORWISE
from loka_compile.lowering.recipes import Gemm
from loka_compile.lowering.recipes import Granularity


class TorchScaledMM(Library):
    name = "torch"
    distribution = "torch"
    recipes = {r.name: r for r in (TENSORWISE, ROWWISE, BLOCKWISE)}

    def version(self) -> str:
        return torch.__version__

    def why_unavailable(self, device: torch.device) -> str | None:
        return _compat.why_no_fp8(device)

    def why_no_recipe(self, recipe: str, device: torch.device) -> str | None:
        why = self.why_unavailable(device)
        if why is None and recipe == BLOCKWISE.name:
            why = _compat.why_no_block_scaled_mm(device)
        return why

    def kernel_dtype(self, gemm: Gemm, out_dtype: torch.dtype) -> torch.dtype:
        # Row scales with an FP32 result are refused by some cuBLASLt builds; bf16 always runs.
        if gemm.a.rows or gemm.b.rows:
            return torch.bfloat16
        if gemm.a.blocks or gemm.b.blocks:
            wide = out_dtype in (torch.float32, torch.float64)
            return torch.float32 if wide else torch.bfloat16
        return torch.float32 if out_dtype == torch.float64 else out_dtype

    def prepare(
        self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, gemm: Gemm
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if gemm.b.blocks:
            if not gemm.a.blocks:
                a_scale = a_scale.expand(a.shape[0], (a.shape[1] + 127) // 128)
            # cuBLASLt wants the number of rows that have scales, and that of the groups along the
            # contraction of a 128 x 128 scale, to be multiples of 4. The rows of A itself are
            # filled up inside the op, where the batch is a number.
            a_scale = fill(a_scale.t(), 1, 4)
            if gemm.b.granularity is Granularity.BLOCK:
                b_scale = fill(b_scale, 1, 4)
            else:
                b_scale = b_scale.t()
        elif gemm.a.rows or gemm.b.rows:
            # Both must be outer vectors once one is.
            a_scale = a_scale if gemm.a.rows else a_scale.expand(a.shape[0], 1)
            b_scale = b_scale if gemm.b.rows else b_scale.expand(b.shape[0], 1)
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
        kernel_dtype = self.kernel_dtype(gemm, out_dtype)
        if gemm.b.blocks:
            groups = gemm.b.granularity is Granularity.GROUP
            out = torch.ops.loka.gemm_torch_blocks(a, a_scale, b, b_scale, groups, kernel_dtype)
            return out.to(out_dtype)
        a_scale, b_scale = as_matrices(a_scale, b_scale)
        out = torch._scaled_mm(
            a,
            b.t(),
            a_scale,
            b_scale.t(),
            out_dtype=kernel_dtype,
            use_fast_accum=gemm.fast_accum,
        )
        return out.to(out_dtype)


def as_matrices(*scales: Tensor) -> tuple[Tensor, ...]:
    """Scales of whole tensors, (), as (1, 1). Inductor's lowering of `_scaled_mm` for CUDA fails on
    one without dimensions that is a view, as a weight's is among those of others."""
    return tuple(scale.reshape(1, 1) if scale.dim() == 0 else scale for scale in scales)


def _blocks(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, groups: bool, dtype: torch.dtype
) -> Tensor:
    """a (R, C); a_scale (groups of C, R rounded up to 4); b (S, C);
    b_scale (groups of C, S) with `groups`, else (blocks of S, groups of C rounded up to 4)."""
    from torch.nn import functional

    kind = functional.ScalingType
    rows = a.shape[0]
    out = functional.scaled_mm(
        fill(a, 4, 1),
        b.t(),
        a_scale.t(),
        kind.BlockWise1x128,
        b_scale.t(),
        kind.BlockWise1x128 if groups else kind.BlockWise128x128,
        swizzle_a=functional.SwizzleType.NO_SWIZZLE,
        swizzle_b=functional.SwizzleType.NO_SWIZZLE,
        output_dtype=dtype,
    )
    return out[:rows]


opaque.define(
    "gemm_torch_blocks", "bool groups, ScalarType dtype", _blocks, lambda groups, dtype: dtype
)
