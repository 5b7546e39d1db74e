"""`fused_chain` with an addend before its norm: post-norm residuals, a norm over two linears' sum.

    fused_chain_add    z = a @ w.T + addend, then as `fused_chain`

The backward is that of the plain chain; dL/dz is the addend's gradient as well, so it is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka_compile.kernels.epilogue import epilogue_ref
from loka_compile.kernels.epilogue import pointwise_ref
from loka_compile.kernels.quantize import quantize_static
from loka_compile.lowering import chain
from loka_compile.lowering.library import LIBRARY

LIBRARY.define(
    "fused_chain_add(Tensor a, Tensor a_scale, Tensor w, Tensor w_scale, Tensor addend, "
    "Tensor? gain, int block, float eps, bool norm, str act, bool gate, bool fast_accum, "
    "ScalarType dtype, Tensor? out_scale, bool save, bool transposed) "
    "-> (Tensor y, Tensor yt, Tensor u, Tensor r)"
)


@torch.library.register_fake("loka::fused_chain_add", lib=LIBRARY)
def _(
    a, a_scale, w, w_scale, addend, gain, block, eps, norm, act, gate, fast, dtype, out_scale,
    save, turned,
):  # fmt: skip
    return chain._outputs(a, w, block, dtype, out_scale is not None, save, turned)


def fused_chain_add_ref(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    addend: Tensor,
    gain: Tensor | None,
    block: int,
    eps: float,
    norm: bool,
    act: str,
    gate: bool,
    fast_accum: bool,
    dtype: torch.dtype,
    out_scale: Tensor | None,
    save: bool,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The op in plain FP32 torch. addend (M, N); the rest as in `chain.fused_chain_ref`."""
    y, yt, u, r = chain._outputs(a, w, block, dtype, out_scale is not None, save, transposed)
    left = a.to(torch.float32) * a_scale.reshape(-1, 1)
    right = w.to(torch.float32) * w_scale.reshape(-1, 1)
    _, z = pointwise_ref(left @ right.t(), None, None, addend)
    wide, normal, inverse = epilogue_ref(z, gain, block, eps, act, gate, norm=norm)
    y = wide.to(dtype) if out_scale is None else quantize_static(wide, out_scale, chain.E4M3)
    if save:
        u, r = normal.to(dtype), inverse
    if transposed:
        yt = chain._turned(y, yt.shape[1])
    return y, yt, u, r


def _cuda(
    a, a_scale, w, w_scale, addend, gain, block, eps, norm, act, gate, fast, dtype, out_scale,
    save, turned,
):  # fmt: skip
    # Imported here: the package must import where Triton is missing.
    from loka_compile.kernels.fused_forward import fused_forward

    out = fused_forward(
        a,
        a_scale,
        w,
        w_scale,
        gain,
        block=block,
        eps=eps,
        act=act,
        gate=gate,
        out_dtype=dtype,
        out_scale=out_scale,
        save_dtype=dtype if save else None,
        transposed=turned,
        norm=norm,
        fast_accum=fast,
        addend=addend,
    )
    none = a.new_empty((0,), dtype=out.y.dtype)
    return (
        out.y,
        none if out.yt is None else out.yt,
        a.new_empty((0,), dtype=dtype) if out.u is None else out.u,
        a.new_empty((0,), dtype=torch.float32) if out.r is None else out.r,
    )


LIBRARY.impl("fused_chain_add", fused_chain_add_ref, "CPU")
LIBRARY.impl("fused_chain_add", _cuda, "CUDA")
