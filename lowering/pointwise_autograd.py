"""`loka::linear_pointwise`: schema, fake, autograd. See `lowering/pointwise.py` for what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from loka_compile import _compat
from loka_compile.lowering import autograd
from loka_compile.lowering import ops
from loka_compile.lowering import pointwise
from loka_compile.lowering.library import LIBRARY

_OPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "linear_pointwise": (
        "(Tensor x, Tensor w, Tensor? bias, Tensor? mul, Tensor? addend, str act, str fwd, "
        "str dgrad, str wgrad, Tensor? x8, Tensor? x_scale, Tensor? x8t, Tensor? w8, "
        "Tensor? w_scale, Tensor? w8t, Tensor? wt_scale, bool save) -> (Tensor y, Tensor t)",
        pointwise.linear_pointwise,
    ),
    "pointwise_backward": (
        "(Tensor gy, Tensor? y, Tensor? t, Tensor? mul, Tensor? addend, str act, "
        "ScalarType dtype) -> (Tensor gp, Tensor gt, Tensor gmul)",
        pointwise.pointwise_backward,
    ),
}
for _name, (_schema, _formula) in _OPS.items():
    LIBRARY.define(_name + _schema)
    LIBRARY.impl(_name, _formula, "CompositeExplicitAutograd")

_DECOMPOSITIONS = {
    getattr(torch.ops.loka, name).default: formula for name, (_, formula) in _OPS.items()
}
# In the same table, so that whoever asks whether the lowering is in force asks for these too.
ops.DECOMPOSITIONS.update(_DECOMPOSITIONS)
_compat.install_decompositions(_DECOMPOSITIONS)


@ops.register_fake("linear_pointwise")
def _(
    x, w, bias, mul, addend, act, fwd, dgrad, wgrad, x8, x_scale, x8t, w8, w_scale, w8t, wt_scale,
    save,
):  # fmt: skip
    shape = (*x.shape[:-1], w.shape[0])
    kept = pointwise.keeps(mul, act, save)
    y = x.new_empty(shape, dtype=pointwise.out_dtype(x.dtype, mul, addend))
    return y, x.new_empty(shape if kept else (0,))


@_compat.register_fake("loka::pointwise_backward", LIBRARY)
def _(gy, y, t, mul, addend, act, dtype):
    none = gy.new_empty((0,))
    gp = none if act == "none" else gy.new_empty(gy.shape)
    if mul is None:
        return gp, none.clone(), none.clone()
    return gp, gy.new_empty(gy.shape, dtype=dtype), mul.new_empty(mul.shape)


def _setup(ctx, inputs, output) -> None:
    x, w, bias, mul, addend, act, _, dgrad, wgrad, x8, x_scale, x8t, _, _, w8t, wt_scale, _ = inputs
    y, t = output
    ctx.mark_non_differentiable(t)
    ctx.set_materialize_grads(False)
    needs_p = act in ("silu", "gelu")
    ctx.save_for_backward(
        w, w8t, wt_scale, *autograd.kept_input(x, x8, x_scale, x8t, wgrad),
        y if act == "relu" else None,
        t if needs_p or mul is not None else None,
        mul,
        addend if needs_p else None,
    )  # fmt: skip
    ctx.kernels = (dgrad, wgrad)
    ctx.form = (act, x.dtype)
    ctx.bias = None if bias is None else bias.dtype
    ctx.addend = None if addend is None else addend.dtype


def _backward(ctx, gy, _gt):
    none = [None] * 17
    if gy is None:
        return tuple(none)
    # Unpacked once: a checkpoint allows no more.
    w, *turned, x, x8, x_scale, x8t, y, t, mul, addend = ctx.saved_tensors
    (act, dtype), (dgrad, wgrad) = ctx.form, ctx.kernels
    gp, gt, gmul = gy, gy, None
    if act != "none" or mul is not None:
        gp, gt, gmul = torch.ops.loka.pointwise_backward(gy, y, t, mul, addend, act, dtype)
        gp = gy if act == "none" else gp
        gt = gp if mul is None else gt
    gt = gt.to(dtype)
    needs = ctx.needs_input_grad
    if needs[0]:
        none[0] = torch.ops.loka.linear_dgrad(gt, w, dgrad, None, None, *turned)
    if needs[1]:
        none[1] = autograd.wgrad_of(gt, (x, x8, x_scale, x8t), wgrad, dtype)
    if ctx.bias is not None and needs[2]:
        none[2] = gt.reshape(-1, gt.shape[-1]).sum(0).to(ctx.bias)
    if mul is not None and needs[3]:
        none[3] = gmul
    if ctx.addend is not None and needs[4]:
        none[4] = gp.to(ctx.addend)
    return tuple(none)


torch.library.register_autograd(
    "loka::linear_pointwise", _backward, setup_context=_setup, lib=LIBRARY
)
torch.library.register_autograd(
    "loka::pointwise_backward", autograd.no_second_order("pointwise_backward"), lib=LIBRARY
)
