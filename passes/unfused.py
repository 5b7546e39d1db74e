"""A linear that ended in no fused op -> why, in one sentence, from what stands around it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from loka_compile.lowering.epilogue_ops import ADDEND
from loka_compile.lowering.epilogue_ops import FACTOR
from loka_compile.lowering.epilogue_ops import LINEAR_EPILOGUE
from loka_compile.lowering.epilogue_ops import RESIDUAL
from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes.block_norm import BLOCK_NORM
from loka_compile.passes.epilogue_chains import activation

FUSED = torch.ops.loka.linear_block_norm_act.default

_NORMS = (BLOCK_NORM, F.layer_norm, torch.rms_norm, F.group_norm, F.batch_norm)
_LINEARS = (m.LINEAR, LINEAR_EPILOGUE, FUSED)
_ACTIVATIONS = (
    F.leaky_relu, F.prelu, torch.prelu, F.elu, F.selu, F.celu, F.softplus, F.mish, F.relu6,
    F.hardtanh, F.softmax, torch.softmax, "softmax",
)  # fmt: skip
_SPLITS = (torch.chunk, "chunk", torch.split, "split", torch.tensor_split, "tensor_split")
_THROUGH = (
    "view", "reshape", "unflatten", "flatten", "unsqueeze", "squeeze", "contiguous",
    torch.reshape, torch.flatten, torch.squeeze, torch.unsqueeze,
)  # fmt: skip
_ROLES = {ADDEND: "addend", FACTOR: "factor", RESIDUAL: "residual"}
#: Where `linear_block_norm_act` has what is added before the norm.
_FUSED_ADDEND = 20
_MOST = 3


def why_alone(linear: fx.Node) -> str:
    """What keeps `linear` from being fused with what follows, when no norm was refused there."""
    before = "; the norm before it belongs to its input" if _is_normed(linear.args[0]) else ""
    return _why(linear) + before


def _why(linear: fx.Node) -> str:
    readers = list(dict.fromkeys(_readers(linear)))
    if not readers:
        return "nobody reads its result"
    if all(r.op == "output" for r in readers):
        return "its result leaves the graph as it is"
    norms = [r for r in readers if g.is_call(r, *_NORMS)]
    if norms:
        others = [m.name_of(r) for r in norms if not g.is_call(r, BLOCK_NORM)]
        return (
            f"the {others[0]} behind it is no block_norm, the one norm that is taken in"
            if others
            else "the norm behind it could not be taken in"
        )
    splits = [r for r in readers if g.is_call(r, *_SPLITS)]
    if any(g.is_call(s, *_NORMS) for split in splits for s in _readers(split)):
        return "a norm reads one part of its result only"
    if len(readers) > 1:
        names = [m.name_of(r) for r in readers]
        more = ", ..." if len(names) > _MOST else ""
        return f"{len(names)} ops read its result ({', '.join(names[:_MOST])}{more})"
    (reader,) = readers
    name = m.name_of(reader)
    if g.is_call(reader, *_LINEARS):
        role = next((_ROLES[i] for i in _ROLES if _reads_at(reader, i, linear)), None)
        if role is not None:
            return f"it is the {role} of another linear's fused op"
        return "the next linear reads its result as it is"
    if g.is_call(reader, *_ACTIVATIONS):
        return f"no norm reads it, and {name} is no activation that a fused op offers"
    if activation(reader) is not None or m.operands(reader, (*m.ADD, *m.MUL)):
        return f"{name} reads it, in a shape or with an operand that a fused op does not take"
    return f"no norm, activation, sum or product reads it ({name} does)"


def _reads_at(reader: fx.Node, at: int, linear: fx.Node) -> bool:
    if g.is_call(reader, FUSED):
        return at == ADDEND and _below(reader.args[_FUSED_ADDEND]) is linear
    return g.is_call(reader, LINEAR_EPILOGUE) and _below(reader.args[at]) is linear


def _below(node: Any) -> Any:
    """Through what `_readers` sees through."""
    while isinstance(node, fx.Node) and (m.is_cast(node) or g.is_call(node, *_THROUGH)):
        node = node.args[0]
    return node


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Those that compute with `node`, seen through casts, views and items."""
    for user in node.users:
        through = g.is_call(user, *_THROUGH) or g.is_call(user, operator.getitem)
        if m.is_cast(user) or (through and m.tensor(user) is not None):
            yield from _readers(user)
        else:
            yield user


def _is_normed(node: Any) -> bool:
    below = m.uncast(node)[0]
    if g.is_call(below, operator.getitem):
        below = below.args[0]
    return g.is_call(below, *_NORMS)
