"""What a library adapter is: what it offers, what it refuses and why, how it is called."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

import torch
from torch import Tensor

from loka_compile.kernels import quantize as q
from loka_compile.lowering.recipes import Gemm
from loka_compile.lowering.recipes import Operand
from loka_compile.lowering.recipes import Recipe


@dataclass(frozen=True)
class GemmShape:
    """The linear that a GEMM belongs to: x (M, K), w (N, K), y (M, N).

    `epilogue` names the fused chain that it opens, e.g. "block_norm:256:hard_swish"; "" for none.
    """

    m: int
    k: int
    n: int
    epilogue: str = ""

    def flops(self) -> int:
        return 2 * self.m * self.k * self.n


class Library:
    """Base adapter: power-of-two scales, `A @ B.T` on operands quantised along the contraction.

    Subclasses set `name`, `distribution` and `recipes` and override what differs. All of
    `quantize`, `fake_quantize`, `gemm` and `emulated_gemm` are traced, so that they consist of aten
    calls and of opaque ops that have fakes; none may branch on a value or on a symbolic size.
    """

    name: str
    distribution: str
    recipes: dict[str, Recipe]
    #: Scales are those of `kernels.quantize`, so that our own kernels may quantise for it.
    own_scales: bool = True

    def version(self) -> str:
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return ""

    def why_unavailable(self, device: torch.device) -> str | None:
        """None when the library's real kernels run on `device`, else the reason."""
        raise NotImplementedError

    def why_not(self, recipe: str, direction: str, shape: GemmShape) -> str | None:
        """None when this GEMM can take `recipe`, else the reason. M is never a reason."""
        if self.recipes[recipe].gemm(direction) is None:
            return f"{self.name}:{recipe} keeps {direction} in high precision"
        for letter, size in (("K", shape.k), ("N", shape.n)):
            if size % 16 or size == 0:
                return f"{letter} = {size} is not a positive multiple of 16"
        return None

    def quantize(
        self, recipe: str, t: Tensor, rule: Operand, amax: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """t (rows, contraction) -> (FP8 tensor, multiplier that dequantises it).

        `amax`, for an operand with one scale, is a maximum recorded elsewhere: the scale covers it.
        """
        return q.quantize(t, self._amax(t, rule, amax), rule.dtype)

    def fake_quantize(
        self, recipe: str, t: Tensor, rule: Operand, amax: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `quantize`, with the FP8 values held in FP32."""
        return q.fake_quantize(t, self._amax(t, rule, amax), rule.dtype)

    @staticmethod
    def _amax(t: Tensor, rule: Operand, amax: Tensor | None) -> Tensor:
        if rule.rows:
            return q.amax_rowwise(t)
        own = q.amax_tensorwise(t)
        return own if amax is None else torch.maximum(own, amax)

    def kernel_dtype(self, gemm: Gemm, out_dtype: torch.dtype) -> torch.dtype:
        """The dtype that the real kernel writes; the result is cast to `out_dtype` after it."""
        return out_dtype

    def gemm(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        gemm: Gemm,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """FP8 a (R, C), b (S, C), contiguous, C a multiple of 16 -> (R, S) in `out_dtype`."""
        raise NotImplementedError

    def emulated_gemm(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        gemm: Gemm,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """The same product from FP8 values held in FP32, accumulated in FP32.

        FP8 values are exact in bf16, and a power-of-two scale commutes with the rounding of the
        result, so a bf16 product equals the FP32 one here and is several times faster.
        """
        written = self.kernel_dtype(gemm, out_dtype)
        work = torch.bfloat16 if written == torch.bfloat16 else torch.float32
        product = torch.mm(a.to(work), b.to(work).t()).to(torch.float32)
        scale_b = b_scale.t() if b_scale.dim() == 2 else b_scale
        return (product * a_scale * scale_b).to(written).to(out_dtype)
