"""Linear -> block_norm -> activation chains in a graph: where they are, in which form.

plain   linear [+ addend] -> [view] -> [to] -> block_norm -> [to] [-> hardswish -> [to]]
gate    v = linear -> [view];  [to](v) * [to](hardsigmoid([to](block_norm([to](v)))))
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from loka_compile.passes import graph as g
from loka_compile.passes import matching as m

#: Activations that are written before the norm.
_BEFORE_NORM = (
    F.silu, F.hardswish, F.relu, torch.relu, "relu", F.gelu, torch._C._nn.gelu, F.leaky_relu,
    torch.tanh, F.tanh, "tanh", torch.sigmoid, F.hardsigmoid,
)  # fmt: skip
_SPLITS = (torch.chunk, "chunk", torch.split, "split", torch.tensor_split, "tensor_split")
_REGROUP = ("view", "reshape", "unflatten", torch.reshape, torch.unflatten)


@dataclass
class Chain:
    """One match. `nodes` are in graph order up to the result, which is the last one."""

    linear: fx.Node
    norm: fx.Node
    view: fx.Node | None
    nodes: list[fx.Node]
    act: str = "none"
    gate: bool = False
    #: Added to the linear's result, of the same shape and dtype; with `flat` of the view's shape.
    addend: fx.Node | None = None
    flat: bool = False

    @property
    def last(self) -> fx.Node:
        return self.nodes[-1]

    def __str__(self) -> str:
        parts = ["linear", *["addend"] * (self.addend is not None)]
        parts += [f"block_norm({self.norm.args[2]})"]
        parts += [] if self.act == "none" else [f"{self.act} gate" if self.gate else self.act]
        return " + ".join(parts)


@dataclass
class Path:
    """What stands between a norm and the op below: casts and at most one view, top down."""

    below: Any
    nodes: list[fx.Node] = field(default_factory=list)
    view: fx.Node | None = None
    why_not: str | None = None
    #: What is added on the way, and whether the view lies below that sum.
    addend: fx.Node | None = None
    flat: bool = False


def down(node: Any) -> Path:
    """From a norm's input down to a linear. What no chain may hold is passed only to name it."""
    path = Path(node)
    while True:
        if m.is_cast(node):
            path.nodes.append(node)
            node = node.args[0]
        elif g.is_call(node, *_REGROUP) and m.tensor(node.args[0]) is not None:
            if path.view is not None:
                path.why_not = "more than one view stands in between"
            path.view = node
            path.flat = path.addend is not None
            path.nodes.append(node)
            node = node.args[0]
        elif g.is_call(node, *m.DROPOUT):
            path.why_not = "an active dropout stands in between"
            node = node.args[0]
        elif g.is_call(node, *_BEFORE_NORM) and m.tensor(node.args[0]) is not None:
            path.why_not = (
                f"{m.name_of(node)} stands in between, and the fused op computes the norm first"
            )
            node = node.args[0]
        elif g.is_call(node, operator.getitem) and g.is_call(node.args[0], *_SPLITS):
            path.why_not = "a split stands in between: the norm reads a part of the linear only"
            node = node.args[0].args[0]
        elif path.why_not is None and (sides := _sum(node)) is not None:
            below, other = sides
            if path.addend is None and _fits(other, node, below):
                path.addend = other
                path.nodes.append(node)
            else:
                path.why_not = "a sum (residual, or a bias that was not joined) stands in between"
            node = below
        elif (stacked := _stacked(node)) is not None:
            path.why_not = "a sum of stacked layers stands in between"
            node = stacked
        else:
            path.below = node
            return path


def _sum(node: Any) -> tuple[Any, Any] | None:
    """(the side of a sum that comes from a linear, the other side)."""
    for side, other in m.operands(node, m.ADD):
        below = side
        while m.is_cast(below) or g.is_call(below, *_REGROUP):
            below = below.args[0]
        if m.is_linear(below):
            return side, other
    return None


def _fits(other: Any, total: fx.Node, side: Any) -> bool:
    """The other side has the shape and dtype that the sum has: nothing is broadcast or widened."""
    values = [m.tensor(n) for n in (other, total, side)]
    if other is side or any(v is None for v in values):
        return False
    first, *rest = (v for v in values if v is not None)
    return all(
        v.dtype == first.dtype and v.device == first.device and m.same_shape(v, first) for v in rest
    )


def _stacked(node: Any) -> fx.Node | None:
    """A linear under `(stack([...]) * weights).sum(...)`."""
    if not g.is_call(node, torch.sum, "sum"):
        return None
    node = node.args[0]
    for a, _ in m.operands(node, m.MUL):
        if g.is_call(a, torch.stack):
            node = a
    if g.is_call(node, torch.stack) and isinstance(node.args[0], (list, tuple)):
        return next((a for a in node.args[0] if m.is_linear(a)), None)
    return None


def chains_of(norm: fx.Node, path: Path) -> Iterator[Chain]:
    """The forms that end in this norm's readers, longest first."""
    results = list(norm.users)
    if len(results) != 1 or not g.is_call(results[0], operator.getitem) or results[0].args[1] != 0:
        return
    base = [path.below, *reversed(path.nodes), norm, results[0]]

    def chain(nodes: list[fx.Node], act: str = "none", gate: bool = False) -> Chain:
        every = [*nodes, *above(nodes[-1])]
        return Chain(path.below, norm, path.view, every, act, gate, path.addend, path.flat)

    def above(node: fx.Node) -> list[fx.Node]:
        return _casts_above(node, g.value(path.below).dtype)

    top = [results[0], *above(results[0])]
    reader = _only_reader(top[-1])
    if reader is not None and g.is_call(reader, F.hardswish) and not g.is_mutation(reader):
        yield chain([*base, *top[1:], reader], "hard_swish")
    gates = path.addend is None and reader is not None and g.is_call(reader, F.hardsigmoid)
    if gates and not g.is_mutation(reader):  # type: ignore[arg-type]
        slope: list[fx.Node] = [reader, *above(reader)]  # type: ignore[list-item, arg-type]
        product = _only_reader(slope[-1])
        for v, other in m.operands(product, m.MUL):
            below, casts = m.uncast(v)
            if other is slope[-1] and below is (path.view or path.below):
                inner = dict.fromkeys([*base, *casts, *top[1:], *slope, *slope[-1].users])
                yield chain(list(inner), "hard_sigmoid", True)
    yield chain(base)


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _casts_above(node: fx.Node, dtype: torch.dtype) -> list[fx.Node]:
    """The casts that follow, as long as each value has one reader and none rounds `dtype`."""
    casts: list[fx.Node] = []
    reader = _only_reader(node)
    while reader is not None and m.is_cast(reader) and m.holds(g.value(reader).dtype, dtype):
        if reader.args[0] is not (casts or [node])[-1]:
            # `other.type_as(value)` reads the value too.
            break
        casts.append(reader)
        reader = _only_reader(reader)
    return casts
