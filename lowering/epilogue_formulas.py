"""What `loka::linear_epilogue` and its backward compute, in plain aten: kernel and decomposition.

    z = x @ w.T (+ bias)                     the GEMM, as in `loka::linear`
    v = scale * z + addend                   both optional; scale is one number
    u = BlockNorm(pre(v))                    block 0: no norm, u = pre(v)
    t = act(gain * u)
    y = t * factor + residual                factor is v itself with `gate`

addend, factor and residual have the shape of z. Epilogues run in FP32 (FP64 if any input is FP64).
The backward needs v and the norm's r. Where z is scaled it gets z instead, and makes v again, since
dL/dscale wants z.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka_compile.kernels import block_norm as bn
from loka_compile.lowering import formulas
from loka_compile.lowering.activations import ACTIVATIONS


def wide_of(*tensors: Tensor | None) -> torch.dtype:
    """The dtype in which an epilogue of these tensors runs."""
    double = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if double else torch.float32


def kept_dtype(x: Tensor, scale: Tensor | None, addend: Tensor | None) -> torch.dtype:
    """Of the value that the backward gets: z's, or what z + addend has."""
    if scale is not None or addend is None:
        return x.dtype
    return torch.promote_types(x.dtype, addend.dtype)


def linear_epilogue(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    fwd: str,
    dgrad: str,
    wgrad: str,
    probe: list[Tensor],
    x8: Tensor | None,
    x_scale: Tensor | None,
    x8t: Tensor | None,
    w8: Tensor | None,
    w_scale: Tensor | None,
    w8t: Tensor | None,
    wt_scale: Tensor | None,
    scale: Tensor | None,
    addend: Tensor | None,
    pre: str,
    block: int,
    eps: float,
    gain: Tensor | None,
    act: str,
    gate: bool,
    factor: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> y (..., N) in `dtype`; v, or z where it is scaled; r (..., blocks), empty without norm."""
    with formulas.exact_dtypes(x.device.type):
        ready = (x8, x_scale, x8t, w8, w_scale, w8t, wt_scale)
        z = formulas.linear(x, w, bias, fwd, dgrad, wgrad, probe, *ready)
        wide = wide_of(x, addend, factor, residual)
        v = _joined(z.to(wide), scale, addend)
        kept = (z if scale is not None else v).to(kept_dtype(x, scale, addend))
        u, r = _normed(v, pre, block, eps)
        y = ACTIVATIONS[act].of(u if gain is None else u * gain.to(wide))
        if gate:
            y = y * v
        elif factor is not None:
            y = y * factor.to(wide)
        if residual is not None:
            y = y + residual.to(wide)
        if y is v:
            # Outputs of an op may not share memory.
            y = v.clone()
        # Dense, whatever the strides of addend, factor and residual are.
        return y.to(dtype).contiguous(), kept.contiguous(), r.contiguous()


def _joined(z: Tensor, scale: Tensor | None, addend: Tensor | None) -> Tensor:
    v = z if scale is None else z * scale.to(z.dtype)
    return v if addend is None else v + addend.to(z.dtype)


def _normed(v: Tensor, pre: str, block: int, eps: float) -> tuple[Tensor, Tensor]:
    a = ACTIVATIONS[pre].of(v)
    return bn.normalize(a, block, eps) if block else (a, v.new_empty((0,)))


def linear_epilogue_backward(
    gy: Tensor,
    kept: Tensor,
    r: Tensor,
    scale: Tensor | None,
    addend: Tensor | None,
    pre: str,
    block: int,
    gain: Tensor | None,
    act: str,
    gate: bool,
    factor: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dL/dy -> (dL/dz in z's dtype or wider, and dL/d of: scale, addend, gain, factor).

    What is not there has an empty gradient. addend is only given with scale: else dL/dz is its
    gradient too.
    """
    wide = r.dtype
    g = gy.to(wide)
    v = kept.to(wide)
    if scale is not None:
        z, v = v, _joined(v, scale, addend)
    u = ACTIVATIONS[pre].of(v)
    if block:
        u = u * bn.spread(r, u.shape[-1], block)
    n = u if gain is None else u * gain.to(wide)
    gfactor, direct = gy.new_empty((0,)), None
    if gate:
        direct = g * ACTIVATIONS[act].of(n)
        g = g * v
    elif factor is not None:
        gfactor = (g * ACTIVATIONS[act].of(n)).to(factor.dtype).contiguous()
        g = g * factor.to(wide)
    g = ACTIVATIONS[act].backward(g, n)
    ggain = gy.new_empty((0,))
    if gain is not None:
        ggain = formulas.as_rows(g * u).sum(0).to(gain.dtype)
        g = g * gain.to(wide)
    if block:
        g = bn.normalize_backward(g, u, r, block)
    g = ACTIVATIONS[pre].backward(g, v)
    if direct is not None:
        g = g + direct
    gscale, gaddend = gy.new_empty((0,)), gy.new_empty((0,))
    if scale is not None:
        gscale = (g * z).sum().to(scale.dtype).reshape(scale.shape)
        if addend is not None:
            gaddend = g.to(addend.dtype).contiguous()
        g = g * scale.to(wide)
    return g.to(kept.dtype).contiguous(), gscale, gaddend, ggain, gfactor
