"""A linear and what reads it pointwise: act(linear(x) * mul + addend), each part optional.

Matches a linear in its canonical spelling before `dispatch` and the `loka::` op after it; both have
(x, w, bias) first. Nothing is rewritten here: see `fuse_pointwise`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from loka_compile.lowering.epilogue import Pointwise
from loka_compile.lowering.pointwise import out_dtype
from loka_compile.passes import graph as g
from loka_compile.passes import matching as m

LINEAR = torch.ops.loka.linear.default
_OBSERVE = "observe"


@dataclass
class Match:
    """`nodes`: from the linear to the result, in graph order."""

    linear: fx.Node
    nodes: list[fx.Node]
    act: str = "none"
    mul: fx.Node | None = None
    addend: fx.Node | None = None

    @property
    def last(self) -> fx.Node:
        return self.nodes[-1]

    @property
    def epilogue(self) -> Pointwise:
        mul = ""
        if self.mul is not None:
            mul = "mul" if g.value(self.mul).dim() else "scale"
        bias = self.linear.args[2] is not None
        return Pointwise(self.act, bias, mul, self.addend is not None)

    def __str__(self) -> str:
        one = self.epilogue
        parts = ["linear", *["bias"] * one.bias, *["factor"] * bool(one.mul)]
        parts += ["addend"] * one.add + [one.act] * (one.act != "none")
        return " + ".join(parts)


def match(linear: fx.Node) -> Match | None:
    """The longest form that begins at `linear` and saves a pass over its result; else None."""
    if not g.is_call(linear, LINEAR) and not m.is_linear(linear):
        return None
    y = m.tensor(linear)
    if y is None or not y.dtype.is_floating_point:
        return None
    found = Match(linear, [linear])
    product = _reader(found.last)
    for value, other in m.operands(product, m.MUL):
        if value is found.last and _fits(other, found.last, scalar=True):
            found.nodes.append(product)
            found.mul = other
            break
    total = _reader(found.last)
    for value, other in m.operands(total, m.ADD):
        if value is found.last and _fits(other, found.last):
            found.nodes.append(total)
            found.addend = other
            break
    if found.mul is not None and found.addend is None:
        # A factor alone may be half of a gate: left to those who look for gates.
        return None
    act = _reader(found.last)
    name = _activation(act)
    if act is not None and name is not None and act.args[0] is found.last:
        found.nodes.append(act)
        found.act = name
    if found.act == "none" and found.addend is None:
        return None
    mul, addend = (m.tensor(n) for n in (found.mul, found.addend))
    return found if g.value(found.last).dtype == out_dtype(y.dtype, mul, addend) else None


def _reader(node: fx.Node) -> Any:
    """The one node that computes with `node`; observers do not count."""
    readers = [u for u in node.users if not (m.name_of(u).startswith(_OBSERVE))]
    one = readers[0] if len(readers) == 1 else None
    return None if one is None or g.is_mutation(one) else one


def _fits(other: Any, value: fx.Node, scalar: bool = False) -> bool:
    """`other` has the shape of `value` and lies beside it, or is one scalar there."""
    mine, theirs = m.tensor(value), m.tensor(other)
    if mine is None or theirs is None or other is value or not theirs.dtype.is_floating_point:
        return False
    if theirs.device != mine.device:
        return False
    if scalar and theirs.dim() == 0:
        return True
    return m.same_shape(theirs, mine)


def _activation(node: Any) -> str | None:
    if g.is_call(node, F.relu, torch.relu, "relu"):
        return "relu"
    if g.is_call(node, F.silu):
        return "silu"
    if g.is_call(node, F.gelu, torch._C._nn.gelu):
        args = m.bound(node, ("input", "approximate"), "none")
        return "gelu" if args is not None and args[1] == "none" else None
    return None


def every_match(gm: fx.GraphModule) -> Iterator[Match]:
    """Matches of one graph, in order; their nodes do not overlap."""
    for node in list(gm.graph.nodes):
        found = match(node)
        if found is not None:
            yield found
