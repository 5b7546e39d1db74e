"""The `loka::` ops: schema, fake, autograd. Forward, dgrad and wgrad are separate nodes.

    linear                        y = x @ w.T (+ bias), three kernel names
    linear_dgrad, linear_wgrad    its gradients
    block_norm                    BlockNorm on its own
    linear_block_norm_act         linear -> BlockNorm -> gain -> activation (plain or gate form)
    *_backward                    closed-form gradients of the epilogues

Each op's eager kernel and its decomposition are one function (`lowering/formulas.py`), so eager,
AOT and Inductor compute the same thing. Ops are defined through `torch.library.Library`: calls of
`@custom_op` cost twice the host time.

`probe` is either empty or the state tensors of a gradient (`probe/statistics.py`); the backward
then records the gradient of the GEMM's output, after the epilogue's own gradient, and how coherent
the weight's gradient is.

`formula` of block_norm is not read. Modules made by `apply_mods` run under plain Inductor too,
whose cache keys know nothing of our decompositions; they pass the digest of the formulas in it, so
that a changed formula is a different graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.errors import DoubleBackwardError
from loka_compile.kernels.block_norm import count_blocks
from loka_compile.kernels.block_norm import wide_dtype
from loka_compile.lowering import formulas

LIBRARY = torch.library.Library("loka", "FRAGMENT")

#: op name -> (schema, formula)
_OPS = {
    "linear": (
        "(Tensor x, Tensor w, Tensor? bias, str fwd, str dgrad, str wgrad, Tensor[] probe) "
        "-> Tensor",
        formulas.linear,
    ),
    "linear_dgrad": ("(Tensor gy, Tensor w, str kernel) -> Tensor", formulas.linear_dgrad),
    "linear_wgrad": ("(Tensor gy, Tensor x, str kernel) -> Tensor", formulas.linear_wgrad),
    "block_norm": (
        "(Tensor x, Tensor? gain, int block, float eps, str formula='') -> (Tensor y, Tensor r)",
        formulas.block_norm,
    ),
    "block_norm_backward": (
        "(Tensor gy, Tensor x, Tensor r, Tensor? gain, int block) -> (Tensor, Tensor)",
        formulas.block_norm_backward,
    ),
    "linear_block_norm_act": (
        "(Tensor x, Tensor? x8, Tensor? x_scale, Tensor w, Tensor? gain, int block, float eps, "
        "str act, bool gate, str fwd, str dgrad, str wgrad, str out, Tensor[] probe) "
        "-> (Tensor y, Tensor y8, Tensor y_scale, Tensor u, Tensor r)",
        formulas.linear_block_norm_act,
    ),
    "block_norm_act_backward": (
        "(Tensor gy, Tensor u, Tensor r, Tensor? gain, int block, str act, bool gate) "
        "-> (Tensor gz, Tensor ggain)",
        formulas.block_norm_act_backward,
    ),
}

for _name, (_schema, _formula) in _OPS.items():
    LIBRARY.define(_name + _schema)
    LIBRARY.impl(_name, _formula, "CompositeExplicitAutograd")


def decompositions() -> dict[Any, Any]:
    """op overload -> formula: the lowering, for Inductor's and AOTAutograd's tables."""
    return {getattr(torch.ops.loka, name).default: formula for name, (_, formula) in _OPS.items()}


#: In force from the import on: modules of `apply_mods` run under plain Inductor too, and an op that
#: stayed opaque there would run step by step, and leave a slow entry in the compile cache.
DECOMPOSITIONS = decompositions()
_compat.install_decompositions(DECOMPOSITIONS)


# -- fakes ----------------------------------------------------------------------------------------


def _fake(name: str):
    return torch.library.register_fake(f"loka::{name}", lib=LIBRARY)


@_fake("linear")
def _(x, w, bias, fwd, dgrad, wgrad, probe):
    return x.new_empty((*x.shape[:-1], w.shape[0]))


@_fake("linear_dgrad")
def _(gy, w, kernel):
    return gy.new_empty((*gy.shape[:-1], w.shape[1]))


@_fake("linear_wgrad")
def _(gy, x, kernel):
    return x.new_empty((gy.shape[-1], x.shape[-1]))


@_fake("block_norm")
def _(x, gain, block, eps, formula=""):
    blocks = count_blocks(x.shape[-1], block)
    r = x.new_empty((*x.shape[:-1], blocks), dtype=wide_dtype(x.dtype))
    return x.new_empty(x.shape), r


@_fake("block_norm_backward")
def _(gy, x, r, gain, block):
    return x.new_empty(x.shape), _gain_gradient(gain, x)


@_fake("linear_block_norm_act")
def _(x, x8, x_scale, w, gain, block, eps, act, gate, fwd, dgrad, wgrad, out, probe):
    lead, features = x.shape[:-1], w.shape[0]
    formulas.check_epilogue(act, gate, out)
    y = x.new_empty((*lead, features))
    wide = wide_dtype(x.dtype)
    r = x.new_empty((*lead, count_blocks(features, block)), dtype=wide)
    if out == "y8":
        y8 = x.new_empty((*lead, features), dtype=torch.float8_e4m3fn)
    else:
        y8 = x.new_empty((0,))
    y_scale = x.new_empty(() if out == "y8" else (0,), dtype=torch.float32)
    return y, y8, y_scale, x.new_empty((*lead, features)), r


@_fake("block_norm_act_backward")
def _(gy, u, r, gain, block, act, gate):
    return u.new_empty(u.shape), _gain_gradient(gain, u)


def _gain_gradient(gain: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty((0,)) if gain is None else torch.empty_like(gain)


# -- autograd -------------------------------------------------------------------------------------


def _observe(g: Tensor, probe: list[Tensor]) -> None:
    if probe:
        torch.ops.loka.observe(g, *probe[:3])


def _observe_coherence(gw: Tensor, g: Tensor, x: Tensor, probe: list[Tensor]) -> None:
    if len(probe) > 3:
        torch.ops.loka.observe_coherence(gw, g, x, *probe[2:])


def _linear_setup(ctx, inputs, output) -> None:
    x, w, bias, _, dgrad, wgrad, probe = inputs
    ctx.save_for_backward(x, w, *probe)
    ctx.kernels = (dgrad, wgrad)
    ctx.has_bias = bias is not None


def _linear_backward(ctx, gy):
    x, w, *probe = ctx.saved_tensors
    dgrad, wgrad = ctx.kernels
    _observe(gy, probe)
    gx = torch.ops.loka.linear_dgrad(gy, w, dgrad) if ctx.needs_input_grad[0] else None
    gw = None
    if ctx.needs_input_grad[1]:
        gw = torch.ops.loka.linear_wgrad(gy, x, wgrad)
        _observe_coherence(gw, gy, x, probe)
    gb = None
    if ctx.has_bias and ctx.needs_input_grad[2]:
        gb = gy.reshape(-1, gy.shape[-1]).sum(0)
    return gx, gw, gb, None, None, None, [None] * len(probe)


def _block_norm_setup(ctx, inputs, output) -> None:
    x, gain, block, *_ = inputs
    _, r = output
    ctx.mark_non_differentiable(r)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, r, gain)
    ctx.block = block


def _block_norm_backward(ctx, gy, _gr):
    if gy is None:
        return None, None, None, None, None
    x, r, gain = ctx.saved_tensors
    gx, ggain = torch.ops.loka.block_norm_backward(gy, x, r, gain, ctx.block)
    return gx, (None if gain is None else ggain), None, None, None


def _fused_setup(ctx, inputs, output) -> None:
    x, _, _, w, gain, block, _, act, gate, _, dgrad, wgrad, _, probe = inputs
    _, y8, y_scale, u, r = output
    ctx.mark_non_differentiable(y8, y_scale, u, r)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w, gain, u, r, *probe)
    ctx.kernels = (dgrad, wgrad)
    ctx.epilogue = (block, act, gate)


def _fused_backward(ctx, gy, *_):
    x, w, gain, u, r, *probe = ctx.saved_tensors
    none: list[Any] = [None] * 14
    none[13] = [None] * len(probe)
    if gy is None:
        return tuple(none)
    dgrad, wgrad = ctx.kernels
    gz, ggain = torch.ops.loka.block_norm_act_backward(gy, u, r, gain, *ctx.epilogue)
    _observe(gz, probe)
    if ctx.needs_input_grad[0]:
        none[0] = torch.ops.loka.linear_dgrad(gz, w, dgrad)
    if ctx.needs_input_grad[3]:
        none[3] = torch.ops.loka.linear_wgrad(gz, x, wgrad)
        _observe_coherence(none[3], gz, x, probe)
    if gain is not None:
        none[4] = ggain
    return tuple(none)


torch.library.register_autograd(
    "loka::linear", _linear_backward, setup_context=_linear_setup, lib=LIBRARY
)
torch.library.register_autograd(
    "loka::block_norm", _block_norm_backward, setup_context=_block_norm_setup, lib=LIBRARY
)
torch.library.register_autograd(
    "loka::linear_block_norm_act", _fused_backward, setup_context=_fused_setup, lib=LIBRARY
)


def _no_second_order(name: str):
    def backward(ctx, *grads):
        raise DoubleBackwardError(f"loka::{name}")

    return backward


# Without a formula autograd would treat these as constants: second-order gradients would be
# silently wrong.
for _name in (
    "linear_dgrad",
    "linear_wgrad",
    "block_norm_backward",
    "block_norm_act_backward",
):
    torch.library.register_autograd(f"loka::{_name}", _no_second_order(_name), lib=LIBRARY)
