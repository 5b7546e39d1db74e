"""FP8 linear with an exact pointwise epilogue, in one kernel of ours.

    t = x @ w.T + bias        p = t * mul + addend        y = act(p)

    linear_pointwise     the op in a graph: quantises its operands, has autograd, is decomposed
    fused_pointwise      the kernel: e4m3 operands; opaque
    pointwise_backward   dL/dy -> dL/dp, dL/dt, dL/dmul, as autograd of the single steps has them

Same maths as the steps, with fewer roundings in between. `mul` and `addend` have y's shape, or mul
is one scalar; of wider dtypes than x they make y wider, as the steps would.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.kernels.epilogue import ACTIVATIONS
from loka_compile.kernels.epilogue import pointwise_ref
from loka_compile.lowering import chain
from loka_compile.lowering import direct_calls
from loka_compile.lowering import formulas
from loka_compile.lowering import gemm
from loka_compile.lowering import tile_store  # noqa: F401  (the kernel asks it for tiles)
from loka_compile.lowering.library import LIBRARY

ACTS = ("none", "relu", "silu", "gelu")


def out_dtype(dtype: torch.dtype, mul: Tensor | None, addend: Tensor | None) -> torch.dtype:
    """Of y, as type promotion of the single steps has it: a scalar `mul` does not promote."""
    for other in (mul, addend):
        if other is not None and other.dim():
            dtype = torch.promote_types(dtype, other.dtype)
    return dtype


def keeps(mul: Tensor | None, act: str, save: bool) -> bool:
    """The backward needs t: for dL/dmul, or for an activation whose slope y does not tell."""
    return save and (mul is not None or act in ("silu", "gelu"))


def linear_pointwise(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    mul: Tensor | None,
    addend: Tensor | None,
    act: str,
    fwd: str,
    dgrad: str,
    wgrad: str,
    x8: Tensor | None,
    x_scale: Tensor | None,
    x8t: Tensor | None,
    w8: Tensor | None,
    w_scale: Tensor | None,
    w8t: Tensor | None,
    wt_scale: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """x (..., K), w (N, K) in one dtype -> y (..., N), and t (..., N) in x's dtype where the
    backward needs it, else empty. `fwd` is a real kernel of ours; ready operands as in
    `formulas.linear`."""
    if act not in ACTS:
        raise ValueError(f"loka::linear_pointwise: act {act!r}, want one of {ACTS}")
    with formulas.exact_dtypes(x.device.type):
        rows, lead, features = formulas.as_rows(x), x.shape[:-1], w.shape[0]
        dtype, kept = out_dtype(x.dtype, mul, addend), keeps(mul, act, save)
        if isinstance(rows.shape[0], int) and rows.shape[0] == 0:
            y = x.new_empty((*lead, features), dtype=dtype)
            return y, x.new_empty((*lead, features) if kept else (0,))
        rule = chain.rule_of(fwd)
        a, a_scale = formulas.pair_of(x8, x_scale) or gemm.operand(rows, rule.a, fwd)
        b, b_scale = formulas.pair_of(w8, w_scale) or gemm.operand(w, rule.b, fwd)
        y, t = torch.ops.loka.fused_pointwise(
            a.contiguous(),
            a_scale.contiguous(),
            b.contiguous(),
            b_scale.contiguous(),
            bias,
            _flat(mul),
            _flat(addend),
            act,
            rule.fast_accum,
            dtype,
            x.dtype if kept else None,
        )
        return (
            formulas.fold(y, lead, features),
            formulas.fold(t, lead, features) if kept else t,
        )


def _flat(other: Tensor | None) -> Tensor | None:
    return other if other is None or not other.dim() else formulas.as_rows(other).contiguous()


def pointwise_backward(
    gy: Tensor,
    y: Tensor | None,
    t: Tensor | None,
    mul: Tensor | None,
    addend: Tensor | None,
    act: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dL/dp, dL/dt in `dtype`, dL/dmul); empty where it is dL/dy itself, or of no operand.

    y for relu, t for the other activations and for `mul`.
    """
    none = gy.new_empty((0,))
    gp = gt = gmul = none
    if act == "relu":
        assert y is not None
        gp = torch.ops.aten.threshold_backward(gy, y, 0)
    elif act != "none":
        assert t is not None
        p = t if mul is None else t * mul
        p = p if addend is None else p + addend
        slope = {"silu": torch.ops.aten.silu_backward, "gelu": torch.ops.aten.gelu_backward}[act]
        gp = slope(gy, p)
    g = gy if act == "none" else gp
    if mul is not None:
        assert t is not None
        gt = (g * mul).to(dtype)
        gmul = (g * t).to(mul.dtype) if mul.dim() else (g * t).sum().to(mul.dtype)
    return gp, gt, gmul


LIBRARY.define(
    "fused_pointwise(Tensor a, Tensor a_scale, Tensor w, Tensor w_scale, Tensor? bias, "
    "Tensor? mul, Tensor? addend, str act, bool fast_accum, ScalarType dtype, ScalarType? keep) "
    "-> (Tensor y, Tensor t)"
)


@_compat.register_fake("loka::fused_pointwise", LIBRARY)
def _(a, a_scale, w, w_scale, bias, mul, addend, act, fast_accum, dtype, keep):
    shape = (a.shape[0], w.shape[0])
    t = a.new_empty((0,), dtype=dtype) if keep is None else a.new_empty(shape, dtype=keep)
    return a.new_empty(shape, dtype=dtype), t


def fused_pointwise_ref(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    mul: Tensor | None,
    addend: Tensor | None,
    act: str,
    fast_accum: bool,
    dtype: torch.dtype,
    keep: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """The kernel in plain FP32 torch: what CPU runs, and what the kernel is tested against.

    a (M, K), w (N, K) e4m3; scales as in `chain.product_ref`; mul (M, N) or (); addend (M, N)
    -> y (M, N) in `dtype`, t (M, N) in `keep`, empty without one.
    """
    t, p = pointwise_ref(chain.product_ref(a, a_scale, w, w_scale), bias, mul, addend)
    y = ACTIVATIONS[act](p).to(dtype)
    return y, (t.to(keep, copy=True) if keep is not None else y.new_empty((0,)))


def _fused_pointwise_cuda(a, a_scale, w, w_scale, bias, mul, addend, act, fast_accum, dtype, keep):
    # Imported late: the package must import where Triton is missing.
    from loka_compile.kernels.tiles import pointwise_block

    forward, allocator = chain.fused_kernel()
    y, _, t, _ = forward(
        a, a_scale, w, w_scale, None, bias, mul, addend, None, pointwise_block(w.shape[0]), 1e-6,
        act, False, dtype, keep, False, False, fast_accum, chain.grouped(w, w_scale),
    )  # fmt: skip
    return y, allocator(y.device)((0,), (1,), dtype) if t is None else t


LIBRARY.impl("fused_pointwise", fused_pointwise_ref, "CPU")
LIBRARY.impl("fused_pointwise", _fused_pointwise_cuda, "CUDA")
direct_calls.register(
    "fused_pointwise", checked=False, cuda=_fused_pointwise_cuda, cpu=fused_pointwise_ref
)
