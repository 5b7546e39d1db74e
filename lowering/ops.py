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

`probe` is empty, or what an observer finds its state by and what orders it (`probe/places.py`): the
backward then records the gradient of the GEMM's output, after the epilogue's own gradient, and how
coherent the weight's gradient is. One tensor alone is the site's cells (`meters.py`), which take
the maxima that a plain step finds anyway.

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
from loka_compile.kernels.block_norm import count_blocks
from loka_compile.kernels.block_norm import wide_dtype
from loka_compile.lowering import autograd
from loka_compile.lowering import chain
from loka_compile.lowering import chain_formulas
from loka_compile.lowering import formulas
from loka_compile.lowering import in_place
from loka_compile.lowering.library import LIBRARY

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
        chain_formulas.linear_block_norm_act,
    ),
    "block_norm_act_backward": (
        "(Tensor gy, Tensor u, Tensor r, Tensor? gain, int block, str act, bool gate) "
        "-> (Tensor gz, Tensor ggain)",
        chain_formulas.block_norm_act_backward,
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
    chain_formulas.check_epilogue(act, gate, out)
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


torch.library.register_autograd(
    "loka::linear", autograd.linear_backward, setup_context=autograd.linear_setup, lib=LIBRARY
)
torch.library.register_autograd(
    "loka::block_norm",
    autograd.block_norm_backward,
    setup_context=autograd.block_norm_setup,
    lib=LIBRARY,
)
torch.library.register_autograd(
    "loka::linear_block_norm_act",
    autograd.fused_backward,
    setup_context=autograd.fused_setup,
    lib=LIBRARY,
)


# Without a formula autograd would treat these as constants: second-order gradients would be
# silently wrong.
for _name in (
    "linear_dgrad",
    "linear_wgrad",
    "block_norm_backward",
    "block_norm_act_backward",
):
    torch.library.register_autograd(f"loka::{_name}", autograd.no_second_order(_name), lib=LIBRARY)
