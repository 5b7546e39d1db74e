"""The three GEMMs of a linear, each a named function, for any kernel name.

    forward(x, w)   y  = x @ w.T          dgrad(gy, w)    gx = gy @ w
    wgrad(gy, x)    gw = gy.T @ x

All operands are 2-D here. Every function is traced: plain aten around one GEMM call. Nothing
branches on a symbolic size; the contraction over the batch (wgrad) is zero-filled to a multiple of
16, which FP8 kernels ask for, whatever M is. K and N that are no multiples of 16 are zero-filled
before the operands are quantised, in the same pass once compiled; the result then takes one copy.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from loka_compile.kernels.quantize_blockwise import fill
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.libraries.base import ALIGNMENT
from loka_compile.lowering.libraries.base import Library
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.recipes import Gemm
from loka_compile.lowering.recipes import Granularity
from loka_compile.lowering.recipes import Operand


def forward(
    x: Tensor,
    w: Tensor,
    kernel: str,
    out_dtype: torch.dtype | None = None,
    amax: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """x (M, K), w (N, K) -> y (M, N). `amax` overrides the scale sources of (A, B) when probing."""
    out_dtype = out_dtype or x.dtype
    if kernel == HIGH_PRECISION:
        return torch.mm(x, w.t()).to(out_dtype)
    return _scaled(x, w, "fwd", kernel, out_dtype, amax)


def dgrad(
    gy: Tensor,
    w: Tensor,
    kernel: str,
    out_dtype: torch.dtype | None = None,
    amax: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """gy (M, N), w (N, K) -> gx (M, K)."""
    out_dtype = out_dtype or gy.dtype
    if kernel == HIGH_PRECISION:
        return torch.mm(gy, w).to(out_dtype)
    return _scaled(gy, w.t(), "dgrad", kernel, out_dtype, amax)


def wgrad(
    gy: Tensor,
    x: Tensor,
    kernel: str,
    out_dtype: torch.dtype | None = None,
    amax: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """gy (M, N), x (M, K) -> gw (N, K)."""
    out_dtype = out_dtype or x.dtype
    if kernel == HIGH_PRECISION:
        return torch.mm(gy.t(), x).to(out_dtype)
    if isinstance(gy.shape[0], int) and gy.shape[0] == 0:
        return gy.new_zeros((gy.shape[1], x.shape[1]), dtype=out_dtype)
    return _scaled(gy.t(), x.t(), "wgrad", kernel, out_dtype, amax)


def forward_quantized(
    x8: Tensor, x_scale: Tensor, w: Tensor, kernel: str, out_dtype: torch.dtype
) -> Tensor:
    """x8 (M, K) FP8 with a scale () known beforehand, w (N, K) -> y (M, N): no pass over x."""
    library, recipe, emulated = split_kernel_name(kernel)
    rule = library.recipes[recipe].fwd
    if rule is None:
        return torch.mm((x8.to(torch.float32) * x_scale).to(w.dtype), w.t()).to(out_dtype)
    rule = replace(rule, a=Operand(Granularity.STATIC, x8.dtype))
    if emulated:
        fb, sb = library.fake_quantize(recipe, w, rule.b)
        return library.emulated_gemm(x8.to(torch.float32), x_scale, fb, sb, rule, out_dtype)
    qb, sb = library.quantize(recipe, _fill_static(w, rows=True), rule.b)
    qa = _fill_static(x8)
    out = library.gemm(qa.contiguous(), x_scale, qb.contiguous(), sb, rule, out_dtype)
    return _trim(out, w.shape[0])


def _scaled(
    a: Tensor,
    b: Tensor,
    direction: str,
    kernel: str,
    out_dtype: torch.dtype,
    amax: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    library, recipe, emulated = split_kernel_name(kernel)
    rule = library.recipes[recipe].gemm(direction)
    if rule is None:
        return torch.mm(a, b.t()).to(out_dtype)
    if isinstance(a.shape[0], int) and a.shape[0] == 0:
        return a.new_zeros((0, b.shape[0]), dtype=out_dtype)
    if emulated:
        fa, sa = library.fake_quantize(recipe, a, rule.a, amax[0])
        fb, sb = library.fake_quantize(recipe, b, rule.b, amax[1])
        return library.emulated_gemm(fa, sa, fb, sb, rule, out_dtype)
    qa, sa, qb, sb = quantized(a, b, direction, library, recipe, rule, amax)
    return _trim(library.gemm(qa, sa, qb, sb, rule, out_dtype), b.shape[0])


def quantized(
    a: Tensor,
    b: Tensor,
    direction: str,
    library: Library,
    recipe: str,
    rule: Gemm,
    amax: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A (R, C), B (S, C) -> FP8 A, its scales, FP8 B, its scales, with C and S rounded up to 16."""
    if direction != "wgrad":
        a = _fill_static(a)
        b = _fill_static(b, rows=True)
    else:
        b = _fill_static(b, rows=True, columns=False)
    qa, sa = library.quantize(recipe, a, rule.a, amax[0])
    qb, sb = library.quantize(recipe, b, rule.b, amax[1])
    if direction == "wgrad":
        # The batch is symbolic more often than not: filled as bytes, after it was read once.
        qa, qb = fill(qa, 1, ALIGNMENT), fill(qb, 1, ALIGNMENT)
    return qa.contiguous(), sa, qb.contiguous(), sb


def _fill_static(t: Tensor, rows: bool = False, columns: bool = True) -> Tensor:
    """Zeros up to a multiple of 16 in sizes that are plain numbers, as a layer's widths are."""
    by_rows = ALIGNMENT if rows and isinstance(t.shape[0], int) else 1
    by_columns = ALIGNMENT if columns and isinstance(t.shape[1], int) else 1
    return fill(t, by_rows, by_columns)


def _trim(out: Tensor, columns: int) -> Tensor:
    """Without the columns that `_fill_static` added."""
    if isinstance(columns, int) and columns % ALIGNMENT:
        return out[:, :columns].contiguous()
    return out
