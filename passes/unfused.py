"""A linear that ended in no fused op -> why, in one sentence, from what stands around it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes.block_norm import BLOCK_NORM

_NORMS = (BLOCK_NORM, F.layer_norm, torch.rms_norm, F.group_norm, F.batch_norm)
_ACTIVATIONS = (
    F.silu, F.hardswish, F.hardsigmoid, F.relu, torch.relu, "relu", F.gelu, torch._C._nn.gelu,
    F.leaky_relu, F.prelu, torch.prelu, F.elu, F.tanh, torch.tanh, "tanh", torch.sigmoid, "sigmoid",
    F.softplus, F.mish, F.relu6,
)  # fmt: skip
_SPLITS = (torch.chunk, "chunk", torch.split, "split", torch.tensor_split, "tensor_split")
_THROUGH = ("view", "reshape", "unflatten", "flatten", torch.reshape, torch.flatten)


def why_alone(linear: fx.Node) -> str:
    """What keeps `linear` from being fused with what follows, when no norm was refused there."""
    before = "; the norm before it belongs to its input" if _is_normed(linear.args[0]) else ""
    readers = list(_readers(linear))
    acts = [r for r in readers if g.is_call(r, *_ACTIVATIONS)]
    if any(g.is_call(r, *_NORMS) for r in readers):
        return "the norm behind it could not be taken in" + before
    for act in acts:
        if any(g.is_call(r, *_NORMS) for r in _readers(act)):
            return (
                f"{m.name_of(act)} stands between it and the norm, and the fused op computes the "
                "norm first"
            ) + before
    splits = [r for r in readers if g.is_call(r, *_SPLITS)]
    if any(g.is_call(s, *_NORMS) for split in splits for s in _readers(split)):
        return "a norm reads one part of its result only" + before
    what = acts[0] if acts else next((r for r in readers if r.op != "output"), None)
    if what is not None and _is_cross(what, linear):
        return "no norm reads it: x0 * linear(x) + x is a pointwise epilogue of its own" + before
    opens = what is not None and g.is_call(what, torch.sigmoid, F.hardsigmoid)
    if what is not None and (m.operands(what, m.MUL) or (opens and _multiplies(what))):
        return "no norm reads it: its result is a gate or is gated" + before
    follows = "" if what is None else f" ({m.name_of(what)} does)"
    return f"no norm reads it{follows}" + before


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Those that compute with `node`, seen through casts, views and items."""
    for user in node.users:
        through = g.is_call(user, *_THROUGH) or g.is_call(user, operator.getitem)
        if m.is_cast(user) or (through and m.tensor(user) is not None):
            yield from _readers(user)
        else:
            yield user


def _multiplies(node: fx.Node) -> bool:
    return any(m.operands(r, m.MUL) for r in _readers(node))


def _is_normed(node: Any) -> bool:
    below = m.uncast(node)[0]
    if g.is_call(below, operator.getitem):
        below = below.args[0]
    return g.is_call(below, *_NORMS)


def _is_cross(product: fx.Node, linear: fx.Node) -> bool:
    """product is x0 * linear(x) and is read by `+ x`."""
    if not m.operands(product, m.MUL):
        return False
    x = linear.args[0]
    return any(a is x for user in product.users for a, _ in m.operands(user, m.ADD))
