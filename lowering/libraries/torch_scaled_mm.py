"""`torch._scaled_mm`: tensorwise and rowwise (cuBLASLt on Hopper; a reference kernel on CPU)."""

from __future__ import annotations

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.lowering.libraries.base import Library
from loka_compile.lowering.recipes import ROWWISE
from loka_compile.lowering.recipes import TENSORWISE
from loka_compile.lowering.recipes import Gemm


class TorchScaledMM(Library):
    name = "torch"
    distribution = "torch"
    recipes = {r.name: r for r in (TENSORWISE, ROWWISE)}

    def version(self) -> str:
        return torch.__version__

    def why_unavailable(self, device: torch.device) -> str | None:
        return _compat.why_no_fp8(device)

    def kernel_dtype(self, gemm: Gemm, out_dtype: torch.dtype) -> torch.dtype:
        # Row scales with an FP32 result are refused by some cuBLASLt builds; bf16 always runs.
        rows = gemm.a.rows or gemm.b.rows
        if rows:
            return torch.bfloat16
        return torch.float32 if out_dtype == torch.float64 else out_dtype

    def gemm(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        gemm: Gemm,
        out_dtype: torch.dtype,
    ) -> Tensor:
        rows = gemm.a.rows or gemm.b.rows
        if rows:
            # Both must be outer vectors once one is.
            a_scale = a_scale if gemm.a.rows else a_scale.expand(a.shape[0], 1)
            b_scale = b_scale if gemm.b.rows else b_scale.expand(b.shape[0], 1)
            a_scale, b_scale = a_scale.contiguous(), b_scale.contiguous().t()
        out = torch._scaled_mm(
            a,
            b.t(),
            a_scale,
            b_scale,
            out_dtype=self.kernel_dtype(gemm, out_dtype),
            use_fast_accum=gemm.fast_accum,
        )
        return out.to(out_dtype)
