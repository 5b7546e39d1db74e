"""TorchAO's three float8 training recipe sets, with TorchAO's own arithmetic.

TorchAO's training linear is a module, not a kernel: what it adds to `torch._scaled_mm` is how it
scales, and that is restated here so that one GEMM at a time can take it. Where it differs from our
own recipes of the same names:

* scale = max / amax with amax floored at 1e-12; tensorwise is not rounded, rowwise is rounded
  down to a power of two;
* rowwise without fast accumulation (dgrad, wgrad) is a tensorwise GEMM with unit scales, whose
  already rounded result is multiplied by the outer product of the row scales.

`tests/lowering/test_torchao.py` compares each direction with TorchAO itself.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.kernels.quantize import FP8_MAX
from loka_compile.kernels.quantize import round_to_fp8
from loka_compile.lowering.libraries.base import Library
from loka_compile.lowering.recipes import ROWWISE
from loka_compile.lowering.recipes import ROWWISE_WITH_GW_HP
from loka_compile.lowering.recipes import TENSORWISE
from loka_compile.lowering.recipes import Gemm
from loka_compile.lowering.recipes import Operand

_AMAX_FLOOR = 1e-12


class TorchAO(Library):
    name = "torchao"
    distribution = "torchao"
    own_scales = False
    recipes = {r.name: r for r in (TENSORWISE, ROWWISE, ROWWISE_WITH_GW_HP)}

    def why_unavailable(self, device: torch.device) -> str | None:
        if not self.version():
            return "torchao is not installed (pip install 'loka-compile[torchao]')"
        return _compat.why_no_fp8(device)

    def quantize(
        self, recipe: str, t: Tensor, rule: Operand, amax: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        scaled, scale = self._scale(recipe, t, rule, amax)
        maximum = FP8_MAX[rule.dtype]
        return scaled.clamp(-maximum, maximum).to(rule.dtype), scale.reciprocal()

    def fake_quantize(
        self, recipe: str, t: Tensor, rule: Operand, amax: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        scaled, scale = self._scale(recipe, t, rule, amax)
        return round_to_fp8(scaled, rule.dtype), scale.reciprocal()

    def _scale(
        self, recipe: str, t: Tensor, rule: Operand, amax: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        own = self._amax(t, rule, amax).to(torch.float64)
        scale = (FP8_MAX[rule.dtype] / own.clamp(min=_AMAX_FLOOR)).to(torch.float32)
        if recipe != TENSORWISE.name:
            # Down to a power of two: drop the mantissa bits.
            scale = (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
        return t.to(torch.float32) * scale, scale

    def priced_as(self, recipe: str, direction: str) -> str:
        """The scales are its own, the call is torch's, but where the result is multiplied after."""
        rule = self.recipes[recipe].gemm(direction)
        if rule is not None and (rule.fast_accum or not (rule.a.rows or rule.b.rows)):
            for one in (TENSORWISE, ROWWISE):
                if one.gemm(direction) == rule:
                    return f"torch:{one.name}"
        return super().priced_as(recipe, direction)

    def arithmetic(self, recipe: str, direction: str, out_dtype: torch.dtype) -> Hashable:
        # Only tensorwise scales are no powers of two.
        return super().arithmetic(recipe, direction, out_dtype), recipe == TENSORWISE.name

    def kernel_dtype(self, gemm: Gemm, out_dtype: torch.dtype) -> torch.dtype:
        # TorchAO computes row-scaled FP16 and FP32 results in bf16 and casts.
        if gemm.a.rows or gemm.b.rows:
            return torch.bfloat16
        return torch.float32 if out_dtype == torch.float64 else out_dtype

    def prepare(
        self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, gemm: Gemm
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if gemm.a.rows or gemm.b.rows:
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
        post = None
        if b_scale.dim() == 2:
            b_scale = b_scale.t()
            if not gemm.fast_accum:
                post = a_scale * b_scale
                a_scale = b_scale = torch.ones((), dtype=torch.float32, device=a.device)
        out = torch._scaled_mm(
            a,
            b.t(),
            a_scale,
            b_scale,
            out_dtype=kernel_dtype,
            use_fast_accum=gemm.fast_accum,
        )
        if post is not None:
            out = (out.to(torch.float32) * post).to(kernel_dtype)
        return out.to(out_dtype)

    def emulated_gemm(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        gemm: Gemm,
        out_dtype: torch.dtype,
    ) -> Tensor:
        if not gemm.a.rows and out_dtype == torch.bfloat16:
            # A scale that is no power of two does not commute with rounding: stay in FP32.
            out = super().emulated_gemm(a, a_scale, b, b_scale, gemm, torch.float32)
            return out.to(out_dtype)
        return super().emulated_gemm(a, a_scale, b, b_scale, gemm, out_dtype)
