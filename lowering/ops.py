"""The `loka::` ops: schema, fake, autograd. Forward, dgrad and wgrad are separate nodes.

    linear                        y = x @ w.T (+ bias), three kernel names
    linear_dgrad, linear_wgrad    its gradients
    block_norm                    BlockNorm on its own
    linear_block_norm_act         linear -> BlockNorm -> gain -> activation (plain or gate form)
    *_backward                    closed-form gradients of the epilogues

Each op's eager kernel and its decomposition are one function (`lowering/formulas.py`; in eager,
dgrad and wgrad survive a kernel that fails, see `in_place.py`), so eager, AOT and Inductor compute
the same thing. Operands that come quantised already (handed over by the
producer, cached, or written by a fused backward) are further arguments, None where there are none;
what they stand for is not read then. Schemas of what is differentiated have no defaults: the
dispatcher drops arguments that equal them, and a registered backward must return one gradient per
argument that was passed.

`probe` is empty, or the state tensors of a gradient (`probe/statistics.py`): the backward then
records the gradient of the GEMM's output, after the epilogue's own gradient, and how coherent the
weight's gradient is. One tensor alone is the site's cells (`meters.py`), which take the maxima that
a plain step finds anyway.

`formula` of block_norm is not read. Modules made by `apply_mods` run under plain Inductor too,
whose cache keys know nothing of our decompositions; they pass the digest of the formulas in it, so
that a changed formula is a different graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.errors import DoubleBackwardError
from loka_compile.kernels.block_norm import count_blocks
from loka_compile.kernels.block_norm import wide_dtype
from loka_compile.lowering import chain
from loka_compile.lowering import chain_backward  # noqa: F401  (registers what a backward calls)
from loka_compile.lowering import formulas
from loka_compile.lowering import gemm
from loka_compile.lowering import in_place
from loka_compile.lowering import meters
from loka_compile.lowering.library import LIBRARY
from loka_compile.lowering.recipes import HIGH_PRECISION

#: op name -> (schema, formula)
_OPS = {
    "linear": (
        "(Tensor x, Tensor w, Tensor? bias, str fwd, str dgrad, str wgrad, Tensor[] probe, "
        "Tensor? x8, Tensor? x_scale, Tensor? x8t, Tensor? w8, Tensor? w_scale, Tensor? w8t, "
        "Tensor? wt_scale) -> Tensor",
        formulas.linear,
    ),
    "linear_dgrad": (
        "(Tensor gy, Tensor w, str kernel, Tensor? gy8, Tensor? gy_scale, Tensor? w8t, "
        "Tensor? wt_scale, Tensor? cells=None) -> Tensor",
        formulas.linear_dgrad,
    ),
    "linear_wgrad": (
        "(Tensor gy, Tensor? x, str kernel, Tensor? gy8t, Tensor? gyt_scale, Tensor? x8t, "
        "Tensor? x_scale, Tensor? cells=None) -> Tensor",
        formulas.linear_wgrad,
    ),
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
        "str act, bool gate, str fwd, str dgrad, str wgrad, str out, Tensor[] probe, "
        "Tensor? x8t, Tensor? w8, Tensor? w_scale, bool save, Tensor? w8t, Tensor? wt_scale, "
        "Tensor? addend) "
        "-> (Tensor y, Tensor y8, Tensor y_scale, Tensor u, Tensor r, Tensor y8t)",
        formulas.linear_block_norm_act,
    ),
    "block_norm_act_backward": (
        "(Tensor gy, Tensor u, Tensor r, Tensor? gain, int block, str act, bool gate) "
        "-> (Tensor gz, Tensor ggain)",
        formulas.block_norm_act_backward,
    ),
}

#: What runs where an op is not decomposed, if that is not the formula itself.
_EAGER = {"linear_dgrad": in_place.linear_dgrad, "linear_wgrad": in_place.linear_wgrad}

for _name, (_schema, _formula) in _OPS.items():
    LIBRARY.define(_name + _schema)
    LIBRARY.impl(_name, _EAGER.get(_name, _formula), "CompositeExplicitAutograd")


def decompositions() -> dict[Any, Any]:
    """op overload -> formula: the lowering, for Inductor's and AOTAutograd's tables."""
    return {getattr(torch.ops.loka, name).default: formula for name, (_, formula) in _OPS.items()}


#: In force from the import on: modules of `apply_mods` run under plain Inductor too, and an op that
#: stayed opaque there would run step by step, and leave a slow entry in the compile cache.
DECOMPOSITIONS = decompositions()
_compat.install_decompositions(DECOMPOSITIONS)

FUSED = torch.ops.loka.linear_block_norm_act.default


# -- fakes ----------------------------------------------------------------------------------------


#: op overload -> its fake, called as it is. The dispatcher around it takes longer than the fake
#: itself, and passes over large graphs ask for thousands.
DIRECT: dict[Any, Callable[..., Any]] = {}


def register_fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Of `loka::name`, whose only differentiable result is the first (or only) one."""

    def register(fake: Callable[..., Any]) -> Callable[..., Any]:
        def direct(*args: Any) -> Any:
            made = fake(*args)
            if torch.is_grad_enabled() and any(
                isinstance(a, Tensor) and a.requires_grad for a in args
            ):
                (made[0] if isinstance(made, tuple) else made).requires_grad_()
            return made

        DIRECT[getattr(torch.ops.loka, name).default] = direct
        _compat.register_fake(f"loka::{name}", LIBRARY)(fake)
        return fake

    return register


_fake = register_fake


@_fake("linear")
def _(x, w, bias, fwd, dgrad, wgrad, probe, *ready):
    return x.new_empty((*x.shape[:-1], w.shape[0]))


@_fake("linear_dgrad")
def _(gy, w, kernel, *ready):
    return gy.new_empty((*gy.shape[:-1], w.shape[1]))


@_fake("linear_wgrad")
def _(gy, x, kernel, gy8t, gyt_scale, x8t, x_scale, cells=None):
    features = x8t.shape[0] if x is None else x.shape[-1]
    return (gy if x is None else x).new_empty((gy.shape[-1], features))


@_fake("block_norm")
def _(x, gain, block, eps, formula=""):
    blocks = count_blocks(x.shape[-1], block)
    r = x.new_empty((*x.shape[:-1], blocks), dtype=wide_dtype(x.dtype))
    return x.new_empty(x.shape), r


@_fake("block_norm_backward")
def _(gy, x, r, gain, block):
    return x.new_empty(x.shape), _gain_gradient(gain, x)


@_fake("linear_block_norm_act")
def _(
    x, x8, x_scale, w, gain, block, eps, act, gate, fwd, dgrad, wgrad, out, probe, x8t, w8,
    w_scale, save, w8t, wt_scale, addend,
):  # fmt: skip
    lead, features = x.shape[:-1], w.shape[0]
    formulas.check_epilogue(act, gate, out)
    e4m3 = torch.float8_e4m3fn
    m = math.prod(lead)
    return (
        x.new_empty((*lead, features)),
        x.new_empty((0,)) if out == "y" else x.new_empty((*lead, features), dtype=e4m3),
        x.new_empty((0,) if out == "y" else (), dtype=torch.float32),
        x.new_empty((*lead, features)) if save else x.new_empty((0,)),
        x.new_empty(
            (*lead, count_blocks(features, block)) if save else (0,), dtype=wide_dtype(x.dtype)
        ),
        x.new_empty((features, chain.round_up(m)), dtype=e4m3)
        if out == "y8t"
        else x.new_empty((0,)),
    )


@_fake("block_norm_act_backward")
def _(gy, u, r, gain, block, act, gate):
    return u.new_empty(u.shape), _gain_gradient(gain, u)


def _gain_gradient(gain: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty((0,)) if gain is None else torch.empty_like(gain)


# -- autograd -------------------------------------------------------------------------------------


def _observe(g: Tensor, probe: list[Tensor]) -> None:
    if len(probe) > 1:
        torch.ops.loka.observe(g, *probe[:3])


def _observe_coherence(gw: Tensor, g: Tensor, x: Tensor | None, probe: list[Tensor]) -> None:
    if len(probe) > 3 and x is not None:
        torch.ops.loka.observe_coherence(gw, g, x, *probe[2:])


def _unless_recorded(cells: Tensor | None, dgrad: str) -> Tensor | None:
    """For wgrad: whatever stores one maximum twice is a kernel more."""
    return None if gemm.records(dgrad, "dgrad") else cells


def _kept_input(x, x8, x_scale, x8t, wgrad):
    """What wgrad will read of a linear's input: (x, x8, x_scale, x8t), the fewest bytes of it."""
    if x8 is None:
        return x, None, None, None
    if x8t is not None and wgrad != HIGH_PRECISION:
        return None, None, x_scale, x8t
    return None, x8, x_scale, None


def _wgrad(gy, kept, wgrad, dtype, gy8t=None, gyt_scale=None, cells=None):
    x, x8, x_scale, x8t = kept
    if x8 is not None:
        # Without a transposed copy the handed input is widened again.
        x, x_scale = (x8.to(torch.float32) * x_scale).to(dtype), None
    return torch.ops.loka.linear_wgrad(gy, x, wgrad, gy8t, gyt_scale, x8t, x_scale, cells)


def _linear_setup(ctx, inputs, output) -> None:
    x, w, bias, _, dgrad, wgrad, probe, x8, x_scale, x8t, _, _, w8t, wt_scale = inputs
    ctx.save_for_backward(w, w8t, wt_scale, *_kept_input(x, x8, x_scale, x8t, wgrad), *probe)
    ctx.kernels = (dgrad, wgrad)
    ctx.dtype = x.dtype
    ctx.has_bias = bias is not None


def _linear_backward(ctx, gy):
    # Unpacked once: a checkpoint allows no more.
    w, w8t, wt_scale, *kept = ctx.saved_tensors
    kept, probe = kept[:4], kept[4:]
    dgrad, wgrad = ctx.kernels
    cells = meters.cells_of(probe)
    _observe(gy, probe)
    gx = gw = None
    if ctx.needs_input_grad[0]:
        gx = torch.ops.loka.linear_dgrad(gy, w, dgrad, None, None, w8t, wt_scale, cells)
        cells = _unless_recorded(cells, dgrad)
    if ctx.needs_input_grad[1]:
        gw = _wgrad(gy, kept, wgrad, ctx.dtype, cells=cells)
        _observe_coherence(gw, gy, kept[0], probe)
    gb = None
    if ctx.has_bias and ctx.needs_input_grad[2]:
        gb = gy.reshape(-1, gy.shape[-1]).sum(0)
    return (gx, gw, gb, None, None, None, [None] * len(probe), *([None] * 7))


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
    x, x8, x_scale, w, gain, block, _, act, gate, fwd, dgrad, wgrad, _, probe, x8t, *rest = inputs
    _, y8, y_scale, u, r, y8t = output
    ctx.mark_non_differentiable(y8, y_scale, u, r, y8t)
    ctx.set_materialize_grads(False)
    kept = _kept_input(x, x8, x_scale, x8t, wgrad)
    # w transposed and quantised already, or None.
    *turned, addend = rest[-3:]
    ctx.save_for_backward(w, *turned, gain, u, r, *kept, *probe)
    ctx.kernels = (fwd, dgrad, wgrad)
    ctx.dtype = x.dtype
    ctx.addend = None if addend is None else addend.dtype
    ctx.epilogue = (block, act, gate)


def _fused_backward(ctx, gy, *_):
    w, w8t, wt_scale, gain, u, r, *kept = ctx.saved_tensors
    kept, probe = kept[:4], kept[4:]
    none: list[Any] = [None] * 21
    none[13] = [None] * len(probe)
    if gy is None:
        return tuple(none)
    fwd, dgrad, wgrad = ctx.kernels
    needs_x, needs_w = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
    rules = chain.backward_rules(*ctx.kernels)
    by_groups = chain.group_rules(fwd, dgrad, wgrad, gy.shape[-1], ctx.epilogue[0])
    gy8 = gy_scale = gy8t = gyt_scale = None
    rows = math.prod(gy.shape[:-1])
    # Without rows there is no maximum to scale by.
    some = not isinstance(rows, int) or rows > 0
    # An addend's gradient is dL/dz itself, which our kernel does not write.
    added = ctx.addend is not None and ctx.needs_input_grad[20]
    cells = meters.cells_of(probe)
    observed = len(probe) > 1
    if (rules or by_groups) and needs_x and needs_w and not observed and some and not added:
        # dL/dz leaves our kernel quantised for both GEMMs; its bf16 form is never written.
        gz = gy
        parts = [t.reshape(-1, t.shape[-1]) for t in (gy, u, r)]
        op = torch.ops.loka.fused_chain_backward
        how: list[Any] = [v for operand in rules or () for v in (operand.rows, operand.dtype)]
        how.append(cells)
        if by_groups:
            op = torch.ops.loka.fused_chain_backward_groups
            how = [operand.dtype for operand in by_groups]
        gy8, gy_scale, gy8t, gyt_scale, ggain = op(*parts, gain, *ctx.epilogue, *how)
        if gain is not None:
            ggain = ggain.sum(0).to(gain.dtype)
    else:
        gz, ggain = torch.ops.loka.block_norm_act_backward(gy, u, r, gain, *ctx.epilogue)
        _observe(gz, probe)
    if gain is not None:
        none[4] = ggain
    if added:
        none[20] = gz.to(ctx.addend)
    if needs_x:
        none[0] = torch.ops.loka.linear_dgrad(gz, w, dgrad, gy8, gy_scale, w8t, wt_scale, cells)
        cells = _unless_recorded(cells, dgrad)
    if needs_w:
        none[3] = _wgrad(gz, kept, wgrad, ctx.dtype, gy8t, gyt_scale, cells)
        _observe_coherence(none[3], gz, kept[0], probe)
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
