"""What a library adapter is: what it offers, what it refuses and why, how it is called."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from loka_compile.kernels import quantize as q
from loka_compile.kernels import quantize_blockwise as qb
from loka_compile.lowering import meters
from loka_compile.lowering.recipes import Gemm
from loka_compile.lowering.recipes import Granularity
from loka_compile.lowering.recipes import Operand
from loka_compile.lowering.recipes import Recipe

#: What FP8 kernels ask of K and N.
ALIGNMENT = 16
ANY_EPILOGUE = "?"
#: Padding inside may make a dimension longer by at most this share.
MOST_PADDING = 0.25


@dataclass(frozen=True)
class GemmShape:
    """The linear that a GEMM belongs to: x (M, K), w (N, K), y (M, N).

    `epilogue` names the fused chain that it opens (`lowering.epilogue`), "" for none, and
    `ANY_EPILOGUE` before the graph has been rewritten.
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
    `quantize`, `fake_quantize`, `prepare`, `call`, `gemm` and `emulated_gemm` are traced, so that
    they consist of aten calls and of opaque ops that have fakes; none may branch on a value or on a
    symbolic size.
    """

    name: str
    distribution: str
    recipes: dict[str, Recipe]
    #: Scales are those of `kernels.quantize`, so that our own kernels may quantise for it.
    own_scales: bool = True
    #: Its forward runs a whole chain and can write the result as e4m3 with a static scale.
    hands_over: bool = False
    #: True when another library's recipes compute the same, so that emulating both is no choice.
    emulated_elsewhere = False
    #: Times configurations of its own at every new shape. Chosen only where the user names it: a
    #: plan that is made during training must not wait for that.
    tunes_itself = False
    #: Recipes that are tried only where `recipes=` or `force=` names them.
    on_request: frozenset[str] = frozenset()

    def serves(self, dtype: torch.dtype | None) -> bool:
        """Is it a choice for layers that compute in `dtype` (None: not known)."""
        return True

    def version(self) -> str:
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return ""

    def why_unavailable(self, device: torch.device) -> str | None:
        """None when the library's real kernels run on `device`, else the reason."""
        raise NotImplementedError

    def why_no_recipe(self, recipe: str, device: torch.device) -> str | None:
        """As `why_unavailable`, for one recipe: some need more of a device than others."""
        return self.why_unavailable(device)

    def why_not(self, recipe: str, direction: str, shape: GemmShape) -> str | None:
        """None when this GEMM can take `recipe`, else the reason. M is never a reason.

        K and N that are no multiples of 16 are padded inside (`lowering/gemm.py`): the operands in
        the quantise step, which writes them anyway, and one more copy of the result where the rows
        of B were padded. Beyond a quarter more work the site is refused.
        """
        if self.recipes[recipe].gemm(direction) is None:
            return f"{self.name}:{recipe} keeps {direction} in high precision"
        for letter, size in (("K", shape.k), ("N", shape.n)):
            if size == 0:
                return f"{letter} = 0 is not a positive multiple of {ALIGNMENT}"
            padding = -size % ALIGNMENT
            if padding > MOST_PADDING * size:
                return (
                    f"{letter} = {size} is not a positive multiple of {ALIGNMENT}, "
                    f"and padding it to {size + padding} adds {padding / size:.0%}"
                )
        return None

    def quantize(
        self, recipe: str, t: Tensor, rule: Operand, amax: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """t (rows, contraction) -> (FP8 tensor, multipliers that dequantise it).

        `amax`, for an operand with one scale, is a maximum recorded elsewhere: the scale covers it.
        For a static operand it is the bound that the scale is made from.
        """
        if not rule.scaled:
            return t.to(rule.dtype), torch.ones((), device=t.device)
        if rule.granularity is Granularity.GROUP:
            return qb.quantize_groups(t, rule.dtype)
        if rule.granularity is Granularity.BLOCK:
            return qb.quantize_blocks(t, rule.dtype)
        return q.quantize(t, self._amax(t, rule, amax), rule.dtype)

    def fake_quantize(
        self, recipe: str, t: Tensor, rule: Operand, amax: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `quantize`, with the FP8 values held in FP32."""
        if not rule.scaled:
            return self.quantize(recipe, t, rule, amax)
        if rule.granularity is Granularity.GROUP:
            return qb.fake_quantize_groups(t, rule.dtype)
        if rule.granularity is Granularity.BLOCK:
            return qb.fake_quantize_blocks(t, rule.dtype)
        return q.fake_quantize(t, self._amax(t, rule, amax), rule.dtype)

    @staticmethod
    def _amax(t: Tensor, rule: Operand, amax: Tensor | None) -> Tensor:
        if rule.granularity is Granularity.STATIC:
            if amax is None:
                raise ValueError(
                    "a static operand is quantised by a bound known beforehand: pass amax="
                )
            return amax.to(torch.float32)
        if rule.rows:
            return q.amax_rowwise(t)
        own = meters.record(q.amax_tensorwise(t))
        return own if amax is None else torch.maximum(own, amax)

    def priced_as(self, recipe: str, direction: str) -> str:
        """The kernel whose call `recipe` makes in `direction`: what one costs, the other does.

        Recipes that differ elsewhere are often one and the same in a direction.
        """
        rule = self.recipes[recipe].gemm(direction)
        first = next(name for name, one in self.recipes.items() if one.gemm(direction) == rule)
        return f"{self.name}:{first}"

    def arithmetic(self, recipe: str, direction: str, out_dtype: torch.dtype) -> Hashable:
        """Equal for kernels whose emulation gives the same numbers, whatever their library."""
        rule = self.recipes[recipe].gemm(direction)
        assert rule is not None, (recipe, direction)
        own = type(self)
        written = self.kernel_dtype(rule, out_dtype)
        return own.quantize, own.fake_quantize, own.emulated_gemm, rule.a, rule.b, written

    def kernel_dtype(self, gemm: Gemm, out_dtype: torch.dtype) -> torch.dtype:
        """The dtype that the real kernel writes; the result is cast to `out_dtype` after it."""
        return out_dtype

    def prepare(
        self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, gemm: Gemm
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Operands as `quantize` gives them -> as `call` wants them: the scales' layout, mostly."""
        return a, a_scale, b, b_scale

    def call(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        gemm: Gemm,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """The kernel itself on prepared operands -> (rows of a, rows of b) in `out_dtype`."""
        raise NotImplementedError

    def gemm(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        gemm: Gemm,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """FP8 a (R, C), b (S, C), contiguous, C and S multiples of 16 -> (R, S) in `out_dtype`."""
        return self.call(*self.prepare(a, a_scale, b, b_scale, gemm), gemm, out_dtype)

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
        result, so a bf16 product equals the FP32 one here and is several times faster. Scales along
        the contraction go onto the values first, which is exact too.
        """
        written = self.kernel_dtype(gemm, out_dtype)
        work = torch.bfloat16 if written == torch.bfloat16 else torch.float32
        if gemm.a.blocks or gemm.b.blocks:
            a = dequantize(a, a_scale, gemm.a)
            b = dequantize(b, b_scale, gemm.b)
            return torch.mm(a.to(work), b.to(work).t()).to(written).to(out_dtype)
        product = torch.mm(a.to(work), b.to(work).t()).to(torch.float32)
        scale_b = b_scale.t() if b_scale.dim() == 2 else b_scale
        return (product * a_scale * scale_b).to(written).to(out_dtype)


def dequantize(values: Tensor, scale: Tensor, rule: Operand) -> Tensor:
    """FP8 values (R, C), in FP8 or FP32, and their scales -> fp32 (R, C)."""
    if rule.granularity is Granularity.GROUP:
        scale = qb.spread_groups(scale, values.shape[1])
    elif rule.granularity is Granularity.BLOCK:
        scale = qb.spread_blocks(scale, values.shape[0], values.shape[1])
    return values.to(torch.float32) * scale
