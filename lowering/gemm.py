"""The three GEMMs of a linear, each a named function, for any kernel name.

    forward(x, w)   y  = x @ w.T          dgrad(gy, w)    gx = gy @ w
    wgrad(gy, x)    gw = gy.T @ x

All operands are 2-D here. Every function is traced: plain aten around one GEMM call. Nothing
branches on a symbolic size; the contraction over the batch (wgrad) is zero-filled to a multiple of
16, which FP8 kernels ask for, whatever M is. K and N that are no multiples of 16 are zero-filled
before the operands are quantised, in the same pass once compiled; the result then takes one copy.

`cells` takes the maximum that a scale of A is made from (`meters.py`).

An operand may come quantised already, as a `Quantized` pair: by the layer before (hand-over), by a
weight cache, by a fused backward. It is contiguous along the contraction, and that of wgrad is
zero-filled.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from loka_compile.kernels.quantize_blockwise import count
from loka_compile.kernels.quantize_blockwise import fill
from loka_compile.lowering import meters
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.libraries.base import ALIGNMENT
from loka_compile.lowering.libraries.base import Library
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.recipes import Gemm
from loka_compile.lowering.recipes import Granularity
from loka_compile.lowering.recipes import Operand

#: (FP8 tensor (rows, contraction), FP32 multiplier of shape () or (rows, 1)).
Quantized = tuple[Tensor, Tensor]
Ready = tuple[Quantized | None, Quantized | None]


def forward(
    x: Tensor,
    w: Tensor,
    kernel: str,
    out_dtype: torch.dtype | None = None,
    amax: tuple[Tensor | None, Tensor | None] = (None, None),
    ready: Ready = (None, None),
    cells: Tensor | None = None,
) -> Tensor:
    """x (M, K), w (N, K) -> y (M, N). `amax` overrides the scale sources of (A, B) when probing;
    `ready` gives (A, B) quantised already, and what it stands for is then not read."""
    out_dtype = out_dtype or x.dtype
    if kernel == HIGH_PRECISION:
        return torch.mm(x, w.t()).to(out_dtype)
    with _recording(kernel, "fwd", ready, cells):
        return _scaled(x, w, "fwd", kernel, out_dtype, amax, ready)


def dgrad(
    gy: Tensor,
    w: Tensor,
    kernel: str,
    out_dtype: torch.dtype | None = None,
    amax: tuple[Tensor | None, Tensor | None] = (None, None),
    ready: Ready = (None, None),
    cells: Tensor | None = None,
) -> Tensor:
    """gy (M, N), w (N, K) -> gx (M, K)."""
    out_dtype = out_dtype or gy.dtype
    if kernel == HIGH_PRECISION:
        return torch.mm(gy, w).to(out_dtype)
    with _recording(kernel, "dgrad", ready, cells):
        return _scaled(gy, w.t(), "dgrad", kernel, out_dtype, amax, ready)


def wgrad(
    gy: Tensor,
    x: Tensor,
    kernel: str,
    out_dtype: torch.dtype | None = None,
    amax: tuple[Tensor | None, Tensor | None] = (None, None),
    ready: Ready = (None, None),
    cells: Tensor | None = None,
) -> Tensor:
    """gy (M, N), x (M, K) -> gw (N, K)."""
    out_dtype = out_dtype or x.dtype
    if kernel == HIGH_PRECISION:
        return torch.mm(gy.t(), x).to(out_dtype)
    if isinstance(gy.shape[0], int) and gy.shape[0] == 0:
        return gy.new_zeros((gy.shape[1], x.shape[1]), dtype=out_dtype)
    with _recording(kernel, "wgrad", ready, cells):
        return _scaled(gy.t(), x.t(), "wgrad", kernel, out_dtype, amax, ready)


def _recording(
    kernel: str, direction: str, ready: Ready, cells: Tensor | None
) -> AbstractContextManager[None]:
    """Record the maximum of A, which is quantised first, where it is found here at all."""
    if ready[0] is not None or not records(kernel, direction):
        cells = None
    return meters.recording(cells, meters.X if direction == "fwd" else meters.GRADIENT)


def records(kernel: str, direction: str) -> bool:
    """Does this GEMM find the maximum of its first operand, where that is not quantised yet."""
    if kernel == HIGH_PRECISION:
        return False
    library, recipe, _ = split_kernel_name(kernel)
    rule = library.recipes[recipe].gemm(direction)
    return rule is not None and rule.a.granularity is Granularity.TENSOR


def _scaled(
    a: Tensor,
    b: Tensor,
    direction: str,
    kernel: str,
    out_dtype: torch.dtype,
    amax: tuple[Tensor | None, Tensor | None],
    ready: Ready,
) -> Tensor:
    library, recipe, emulated = split_kernel_name(kernel)
    rule = library.recipes[recipe].gemm(direction)
    if rule is None:
        return torch.mm(a, b.t()).to(out_dtype)
    if isinstance(a.shape[0], int) and a.shape[0] == 0:
        return a.new_zeros((0, b.shape[0]), dtype=out_dtype)
    if not rule.a.scaled:
        # The same everywhere, and any size goes.
        qa, qb = _cast(a, rule.a, ready[0]), _cast(b, rule.b, ready[1])
        one = torch.ones((), dtype=torch.float32, device=a.device)
        return library.call(qa, one, qb, one, rule, out_dtype)
    if emulated:
        fa, sa = operand(a, rule.a, kernel, amax[0], ready[0])
        fb, sb = operand(b, rule.b, kernel, amax[1], ready[1])
        if direction == "wgrad" and ready != (None, None):
            # A ready operand is filled up behind the batch. The other one is filled too: cutting
            # the first would ask whether a symbolic batch is as long as its rounded self.
            fa, fb = fill(fa, 1, ALIGNMENT), fill(fb, 1, ALIGNMENT)
        return library.emulated_gemm(fa, sa, fb, sb, rule, out_dtype)
    qa, sa, qb, sb = quantized(a, b, direction, library, recipe, rule, amax, ready)
    return _trim(library.gemm(qa, sa, qb, sb, rule, out_dtype), b.shape[0])


def _cast(t: Tensor, rule: Operand, ready: Quantized | None) -> Tensor:
    if ready is None:
        return t.to(rule.dtype)
    q, scale = ready
    if q.dtype != rule.dtype:
        q = (q.to(torch.float32) * scale).to(rule.dtype)
    return q[:, : t.shape[1]]


def quantized(
    a: Tensor,
    b: Tensor,
    direction: str,
    library: Library,
    recipe: str,
    rule: Gemm,
    amax: tuple[Tensor | None, Tensor | None] = (None, None),
    ready: Ready = (None, None),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A (R, C), B (S, C) -> FP8 A, its scales, FP8 B, its scales, with C and S rounded up to 16."""
    batch = direction == "wgrad"
    qa, sa = _padded(a, library, recipe, rule.a, amax[0], ready[0], columns=not batch)
    qb, sb = _padded(b, library, recipe, rule.b, amax[1], ready[1], columns=not batch, rows=True)
    if batch:
        # The batch is symbolic more often than not: filled as bytes, after it was read once.
        qa, qb = fill(qa, 1, ALIGNMENT), fill(qb, 1, ALIGNMENT)
    return qa.contiguous(), sa, qb.contiguous(), sb


def _padded(
    t: Tensor,
    library: Library,
    recipe: str,
    rule: Operand,
    amax: Tensor | None,
    ready: Quantized | None,
    columns: bool,
    rows: bool = False,
) -> Quantized:
    if ready is None:
        return library.quantize(recipe, _fill_static(t, rows, columns), rule, amax)
    q = _fill_static(ready[0], rows, columns)
    return q, _spread(ready[1], rule, q)


def _spread(scale: Tensor, rule: Operand, q: Tensor) -> Tensor:
    """A ready operand's scale in the shape that its rule says, also for rows that were filled."""
    if scale.dim() == 0 and rule.rows:
        return scale.expand(q.shape[0], 1)
    if scale.dim() == 0 and rule.blocks:
        return scale.expand(q.shape[0], count(q.shape[1])).contiguous()
    if rule.rows and isinstance(q.shape[0], int) and scale.shape[0] != q.shape[0]:
        return fill(scale, ALIGNMENT, 1)
    return scale


def operand(
    t: Tensor,
    rule: Operand,
    kernel: str,
    amax: Tensor | None = None,
    ready: Quantized | None = None,
) -> Quantized:
    """One operand as `kernel` reads it: FP8, or FP8 values held in FP32 when it is emulated."""
    library, recipe, emulated = split_kernel_name(kernel)
    if ready is None:
        prepare = library.fake_quantize if emulated else library.quantize
        return prepare(recipe, t, rule, amax)
    q, scale = ready
    if emulated:
        q = q.to(torch.float32)
    return q, _spread(scale, rule, q)


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
