"""BF16 products for layers that compute in float32: nothing is scaled, the operands are only cast.

A kernel like any other: it must pass the accuracy gate, and be faster than float32 or TF32 by the
minimum speedup. The result is rounded to bf16 once and cast back, which Inductor fuses into its
readers; in a fused chain BlockNorm and activation then run in FP32, as they always do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.libraries.base import Library
from loka_compile.lowering.recipes import BF16
from loka_compile.lowering.recipes import Gemm


class Bf16(Library):
    name = "bf16"
    distribution = "torch"
    own_scales = False
    recipes = {BF16.name: BF16}
    # Emulation is there to show FP8; the most accurate kernel would always be this one.
    emulated_elsewhere = True

    def serves(self, dtype: torch.dtype | None) -> bool:
        return dtype == torch.float32

    def version(self) -> str:
        return torch.__version__

    def why_unavailable(self, device: torch.device) -> str | None:
        return _compat.why_no_bf16(device)

    def why_not(self, recipe: str, direction: str, shape: GemmShape) -> str | None:
        """Any size goes."""
        empty = "K" if shape.k == 0 else "N" if shape.n == 0 else ""
        return f"{empty} = 0: there is nothing to multiply" if empty else None

    def call(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        gemm: Gemm,
        out_dtype: torch.dtype,
    ) -> Tensor:
        return torch.mm(a.to(gemm.a.dtype), b.to(gemm.b.dtype).t()).to(out_dtype)
