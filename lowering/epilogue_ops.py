"""`loka::linear_epilogue`: a linear and what stands around it, as one op; see the formulas.

Its first fourteen arguments are those of `loka::linear`, in the same places. Forward, dgrad and
wgrad are the same separate nodes; the gradient that observers see is that of the GEMM's output. r
is always there, in the dtype of the epilogue, so that the backward knows it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.kernels.block_norm import count_blocks
from loka_compile.lowering import autograd
from loka_compile.lowering import epilogue_formulas as formulas
from loka_compile.lowering import meters
from loka_compile.lowering import ops
from loka_compile.lowering.activations import ACTIVATIONS
from loka_compile.lowering.library import LIBRARY

_SCHEMAS = {
    "linear_epilogue": (
        "(Tensor x, Tensor w, Tensor? bias, str fwd, str dgrad, str wgrad, Tensor[] probe, "
        "Tensor? x8, Tensor? x_scale, Tensor? x8t, Tensor? w8, Tensor? w_scale, Tensor? w8t, "
        "Tensor? wt_scale, Tensor? scale, Tensor? addend, str pre, int block, float eps, "
        "Tensor? gain, str act, bool gate, Tensor? factor, Tensor? residual, "
        "ScalarType dtype) -> (Tensor y, Tensor kept, Tensor r)",
        formulas.linear_epilogue,
    ),
    "linear_epilogue_backward": (
        "(Tensor gy, Tensor kept, Tensor r, Tensor? scale, Tensor? addend, str pre, int block, "
        "Tensor? gain, str act, bool gate, Tensor? factor) "
        "-> (Tensor gz, Tensor gscale, Tensor gaddend, Tensor ggain, Tensor gfactor)",
        formulas.linear_epilogue_backward,
    ),
}
for _name, (_schema, _formula) in _SCHEMAS.items():
    LIBRARY.define(_name + _schema)
    LIBRARY.impl(_name, _formula, "CompositeExplicitAutograd")

LINEAR_EPILOGUE = torch.ops.loka.linear_epilogue.default
_BACKWARD = torch.ops.loka.linear_epilogue_backward.default

ops.DECOMPOSITIONS.update(
    {LINEAR_EPILOGUE: formulas.linear_epilogue, _BACKWARD: formulas.linear_epilogue_backward}
)
_compat.install_decompositions(ops.DECOMPOSITIONS)

#: Where the arguments behind those of `loka::linear` are.
SCALE, ADDEND, PRE, BLOCK, EPS, GAIN, ACT, GATE, FACTOR, RESIDUAL, DTYPE = range(14, 25)


@_compat.register_fake("loka::linear_epilogue", LIBRARY)
def _(x, w, bias, fwd, dgrad, wgrad, probe, x8, x_scale, x8t, w8, w_scale, w8t,
      wt_scale, scale, addend, pre,
      block, eps, gain, act, gate, factor, residual, dtype):  # fmt: skip
    for name in (pre, act):
        if name not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"loka::linear_epilogue: activation {name!r}, want one of {known}")
    shape = (*x.shape[:-1], w.shape[0])
    blocks = (*x.shape[:-1], count_blocks(w.shape[0], block)) if block else (0,)
    wide = formulas.wide_of(x, addend, factor, residual)
    return (
        x.new_empty(shape, dtype=dtype),
        x.new_empty(shape, dtype=formulas.kept_dtype(x, scale, addend)),
        x.new_empty(blocks, dtype=wide),
    )


@_compat.register_fake("loka::linear_epilogue_backward", LIBRARY)
def _(gy, kept, r, scale, addend, pre, block, gain, act, gate, factor):
    def like(t: Tensor | None) -> Tensor:
        return gy.new_empty((0,)) if t is None else t.new_empty(t.shape)

    inner = None if scale is None else addend
    return kept.new_empty(kept.shape), like(scale), like(inner), like(gain), like(factor)


def _setup(ctx, inputs, output) -> None:
    x, w, bias, _, dgrad, wgrad, probe, x8, x_scale, x8t, _, _, *turned = inputs[:SCALE]
    scale, addend, pre, block, _, gain, act, gate, factor, residual, _ = inputs[SCALE:]
    y, z, r = output
    ctx.mark_non_differentiable(z, r)
    ctx.set_materialize_grads(False)
    kept = autograd.kept_input(x, x8, x_scale, x8t, wgrad)
    inner = None if scale is None else addend
    plain = pre == "none" and not block and not gate and scale is factor is residual is None
    if act == "relu" and plain and y.dtype == z.dtype:
        # Its slope shows in the result, which the next layer keeps anyway.
        z = y
    seen = autograd.for_observers(x, x8, probe)
    ctx.save_for_backward(w, *turned, z, r, scale, inner, gain, factor, seen, *kept, *probe)
    ctx.kernels = (dgrad, wgrad)
    ctx.form = (pre, block, act, gate)
    ctx.dtypes = (x.dtype, *(None if t is None else t.dtype for t in (addend, residual)))
    ctx.has_bias = bias is not None


def _backward(ctx, gy, *_):
    w, w8t, wt_scale, z, r, scale, addend, gain, factor, x, *kept = ctx.saved_tensors
    kept, probe = kept[:4], kept[4:]
    none: list[Any] = [None] * 25
    none[6] = [None] * len(probe)
    if gy is None:
        return tuple(none)
    dgrad, wgrad = ctx.kernels
    dtype, addend_dtype, residual_dtype = ctx.dtypes
    pre, block, act, gate = ctx.form
    gv, gscale, gaddend, ggain, gfactor = torch.ops.loka.linear_epilogue_backward(
        gy, z, r, scale, addend, pre, block, gain, act, gate, factor
    )
    if residual_dtype is not None:
        none[RESIDUAL] = gy.to(residual_dtype)
    if addend_dtype is not None:
        none[ADDEND] = gv.to(addend_dtype) if scale is None else gaddend
    none[SCALE] = None if scale is None else gscale
    none[GAIN] = None if gain is None else ggain
    none[FACTOR] = None if factor is None else gfactor
    gz = gv.to(dtype)
    autograd.observe(gz, probe)
    cells = meters.cells_of(probe)
    if ctx.needs_input_grad[0]:
        none[0] = torch.ops.loka.linear_dgrad(gz, w, dgrad, None, None, w8t, wt_scale, cells)
        cells = autograd.unless_recorded(cells, dgrad)
    if ctx.needs_input_grad[1]:
        none[1] = autograd.wgrad_of(gz, kept, wgrad, dtype, cells=cells)
        autograd.observe_coherence(none[1], gz, autograd.seen_input(kept, x, probe), probe)
    if ctx.has_bias and ctx.needs_input_grad[2]:
        none[2] = gz.reshape(-1, gz.shape[-1]).sum(0)
    return tuple(none)


torch.library.register_autograd(
    "loka::linear_epilogue", _backward, setup_context=_setup, lib=LIBRARY
)
torch.library.register_autograd(
    "loka::linear_epilogue_backward",
    autograd.no_second_order("linear_epilogue_backward"),
    lib=LIBRARY,
)
