"""The three GEMMs of a linear, each a named function, for any kernel name.

    forward(x, w)   y  = x @ w.T          dgrad(gy, w)    gx = gy @ w
    wgrad(gy, x)    gw = gy.T @ x

All operands are 2-D here. Every function is traced: plain aten around one GEMM call. Nothing
branches on a symbolic size; the contraction over the batch (wgrad) is zero-filled to a multiple of
16, which FP8 kernels ask for, whatever M is.

An operand may come quantised already, as a `Quantized` pair: by the layer before (hand-over), by a
weight cache, by a fused backward. It is contiguous along the contraction, and that of wgrad is
zero-filled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.recipes import HIGH_PRECISION
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
) -> Tensor:
    """x (M, K), w (N, K) -> y (M, N). `amax` overrides the scale sources of (A, B) when probing;
    `ready` gives (A, B) quantised already, and what it stands for is then not read."""
    out_dtype = out_dtype or x.dtype
    if kernel == HIGH_PRECISION:
        return torch.mm(x, w.t()).to(out_dtype)
    return _scaled(x, w, "fwd", kernel, out_dtype, amax, ready)


def dgrad(
    gy: Tensor,
    w: Tensor,
    kernel: str,
    out_dtype: torch.dtype | None = None,
    amax: tuple[Tensor | None, Tensor | None] = (None, None),
    ready: Ready = (None, None),
) -> Tensor:
    """gy (M, N), w (N, K) -> gx (M, K)."""
    out_dtype = out_dtype or gy.dtype
    if kernel == HIGH_PRECISION:
        return torch.mm(gy, w).to(out_dtype)
    return _scaled(gy, w.t(), "dgrad", kernel, out_dtype, amax, ready)


def wgrad(
    gy: Tensor,
    x: Tensor,
    kernel: str,
    out_dtype: torch.dtype | None = None,
    amax: tuple[Tensor | None, Tensor | None] = (None, None),
    ready: Ready = (None, None),
) -> Tensor:
    """gy (M, N), x (M, K) -> gw (N, K)."""
    out_dtype = out_dtype or x.dtype
    if kernel == HIGH_PRECISION:
        return torch.mm(gy.t(), x).to(out_dtype)
    if isinstance(gy.shape[0], int) and gy.shape[0] == 0:
        return gy.new_zeros((gy.shape[1], x.shape[1]), dtype=out_dtype)
    return _scaled(gy.t(), x.t(), "wgrad", kernel, out_dtype, amax, ready)


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
    qa, sa = operand(a, rule.a, kernel, amax[0], ready[0])
    qb, sb = operand(b, rule.b, kernel, amax[1], ready[1])
    if emulated:
        return library.emulated_gemm(qa, sa, qb, sb, rule, out_dtype)
    if direction == "wgrad":
        qa, qb = fill_contraction(qa), fill_contraction(qb)
    return library.gemm(qa.contiguous(), sa, qb.contiguous(), sb, rule, out_dtype)


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
    if rule.rows and scale.dim() == 0:
        scale = scale.expand(t.shape[0], 1)
    # Emulation contracts over the true M; a handed operand may be filled up behind it.
    return (q[:, : t.shape[1]].to(torch.float32) if emulated else q), scale


def fill_contraction(q: Tensor) -> Tensor:
    """(R, M) FP8 -> (R, M rounded up to 16), zero-filled; a no-op for a static multiple of 16.

    The new size is spelled 16 * (...), so that its divisibility is known without a guard.
    """
    m = q.shape[1]
    if isinstance(m, int) and m % 16 == 0:
        return q
    whole = 16 * ((m + 15) // 16)
    # FP8 tensors have few ops; zero has the byte 0 in every format.
    bits = torch.zeros((q.shape[0], whole), dtype=torch.uint8, device=q.device)
    bits = torch.slice_scatter(bits, q.contiguous().view(torch.uint8), dim=1, start=0, end=m)
    return bits.view(q.dtype)
