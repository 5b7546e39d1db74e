"""Graph -> graph with F.hardsigmoid and F.hardswish where they are written out.

relu6(x + 3) / 6, clamp(x + 3, 0, 6) / 6, hardtanh(x + 3, 0, 6) * (1 / 6)     hardsigmoid(x)
x * relu6(x + 3) / 6, x * hardsigmoid(x)                                       hardswish(x)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes.aliases import Facts
from loka_compile.passes.manager import PassContext

_DIV = (
    operator.truediv,
    torch.div,
    torch.true_divide,
    torch.divide,
    "div",
    "__truediv__",
    "divide",
)
_CLAMP = (torch.clamp, torch.clip, "clamp", "clip")
_SIXTH = 1 / 6


def hard_gates(gm: fx.GraphModule, context: PassContext) -> None:
    facts = Facts(gm)
    for node in gm.graph.nodes:
        if g.is_call(node, F.hardsigmoid, F.hardswish) and not g.is_mutation(node):
            node.args, node.kwargs = tuple((*node.args, *node.kwargs.values())[:1]), {}
    for node in list(gm.graph.nodes):
        found = _hard_sigmoid(node)
        if found is not None:
            _put(gm, facts, node, F.hardsigmoid, *found, context)
    for node in list(gm.graph.nodes):
        found = _hard_swish(node)
        if found is not None:
            _put(gm, facts, node, F.hardswish, *found, context)


def _put(
    gm: fx.GraphModule,
    facts: Facts,
    node: fx.Node,
    target: Any,
    x: fx.Node,
    inner: list[fx.Node],
    context: PassContext,
) -> None:
    name = target.__name__
    why = None
    if g.value(node).dtype != g.value(x).dtype or g.value(node).shape != g.value(x).shape:
        why = "it changes the dtype or shape"
    elif g.value(x).dtype == torch.float64:
        why = "torch's own has 1/6 rounded to FP32"
    elif g.value(x).dtype == torch.float16 and any(m.operands(n, m.MUL) for n in inner):
        why = f"the product before the division overflows in float16 where {name} does not"
    else:
        reader = m.leak([*inner, node])
        if reader is not None:
            why = f"{m.name_of(reader)} inside it has other readers"
        else:
            first = min(inner, key=facts.order.__getitem__)
            why = facts.obstacle(first, node, [x], inside=inner)
    if why is not None:
        return context.refused(node, f"{name} written by hand: {why}; left as written")
    context.rewrote(node, f"{name} written by hand -> {name}")
    with gm.graph.inserting_before(node):
        new = m.call(gm.graph, target, (x,), like=node)
    facts.replace(node, new)
    for dead in sorted(inner, key=facts.order.__getitem__, reverse=True):
        gm.graph.erase_node(dead)


def _sixth_of(node: Any) -> Any:
    """y, if node is y / 6."""
    if g.is_call(node, *_DIV) and len(node.args) == 2 and not node.kwargs:
        return node.args[0] if _is(node.args[1], 6) else None
    return next((y for y, by in m.operands(node, m.MUL) if _is(by, _SIXTH)), None)


def _clipped(node: Any) -> tuple[fx.Node, list[fx.Node]] | None:
    """(x, the two nodes), if node is min(max(x + 3, 0), 6)."""
    args: tuple[Any, ...] | None
    if g.is_call(node, F.relu6):
        args = m.bound(node, ("input", "inplace"), False)
        args = None if args is None else (args[0], 0, 6, args[1])
    elif g.is_call(node, F.hardtanh):
        args = m.bound(node, ("input", "min_val", "max_val", "inplace"), -1.0, 1.0, False)
    elif g.is_call(node, *_CLAMP):
        args = m.bound(node, ("input", "min", "max"), None, None)
        args = None if args is None else (*args, False)
    else:
        return None
    if args is None or args[3] or not (_is(args[1], 0) and _is(args[2], 6)):
        return None
    for x, three in m.operands(args[0], m.ADD):
        if _is(three, 3) and m.tensor(x) is not None and g.value(x).is_floating_point():
            return x, [args[0], node]
    return None


def _hard_sigmoid(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    return _clipped(_sixth_of(node))


def _hard_swish(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    for x, other in m.operands(node, m.MUL):
        if g.is_call(other, F.hardsigmoid) and other.args[0] is x and not g.is_mutation(other):
            return x, [other]
    product = _sixth_of(node)
    for x, other in m.operands(product, m.MUL):
        found = _clipped(other)
        if found is not None and found[0] is x:
            return x, [*found[1], product]
    # x / 6 * relu6(x + 3)
    for left, right in m.operands(node, m.MUL):
        found, x = _clipped(right), _sixth_of(left)
        if found is not None and found[0] is x:
            return found[0], [*found[1], left]
    return None


def _is(value: Any, number: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == number
