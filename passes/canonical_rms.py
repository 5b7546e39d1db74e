"""Graph -> graph in which RMSNorm written by hand is torch.rms_norm.

`x * rsqrt(mean(x**2, -1, keepdim=True) + eps)`, in its many spellings, where all that can differ is
the order of rounding.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes.aliases import Facts
from loka_compile.passes.manager import PassContext

_DIV = (operator.truediv, torch.div, torch.true_divide, "div", "__truediv__")
_RSQRT = (torch.rsqrt, "rsqrt")
_SQRT = (torch.sqrt, "sqrt")
_POW = (torch.pow, operator.pow, "pow", "__pow__")


@dataclass
class _Factor:
    """1 / sqrt(mean(squared ** 2) + eps), and the nodes that compute it, first one first."""

    squared: fx.Node
    eps: float
    nodes: list[fx.Node]


def written_norms(gm: fx.GraphModule, context: PassContext) -> None:
    facts = Facts(gm)
    for node in list(gm.graph.nodes):
        if node not in facts.order:
            continue
        for top, factor in _candidates(node, context):
            if _rewrite(gm, facts, node, top, factor, context):
                break


def _candidates(node: fx.Node, context: PassContext) -> list[tuple[fx.Node, _Factor]]:
    found = []
    pairs = [(top, bottom, False) for top, bottom in m.operands(node, m.MUL)]
    if g.is_call(node, *_DIV) and len(node.args) == 2 and not node.kwargs:
        pairs.append((*node.args, True))
    for top, bottom, divides in pairs:
        if m.tensor(top) is not None and isinstance(bottom, fx.Node):
            factor = _factor(bottom, divides, context)
            if factor is not None:
                found.append((top, factor))
    return found


def _factor(node: fx.Node, divides: bool, context: PassContext) -> _Factor | None:
    below, nodes = m.uncast(node)
    if divides:
        for root, eps in m.operands(below, m.ADD):
            if g.is_call(root, *_SQRT) and _mean(root.args[0]) and not isinstance(eps, fx.Node):
                context.refused(below, "RMS written by hand: eps is added outside the root")
    elif g.is_call(below, *_DIV) and below.args[0] == 1 and not below.kwargs:
        nodes, below, divides = [*nodes, below], below.args[1], True
    elif g.is_call(below, torch.reciprocal, "reciprocal"):
        nodes, below, divides = [*nodes, below], below.args[0], True
    if not g.is_call(below, *(_SQRT if divides else _RSQRT)) or len(below.args) != 1:
        return None
    inside = below.args[0]
    for mean, eps in m.operands(inside, m.ADD):
        power = _mean(mean)
        squared = _squared(power)
        if power is None or squared is None:
            continue
        if isinstance(eps, bool) or not isinstance(eps, (int, float)):
            context.refused(below, "RMS written by hand: eps is not a literal (dynamic=True?)")
            return None
        return _Factor(squared, float(eps), [power, mean, inside, below, *reversed(nodes)])
    return None


def _mean(node: Any) -> fx.Node | None:
    """x, if node is x.mean(-1, keepdim=True)."""
    if not g.is_call(node, torch.mean, "mean"):
        return None
    args = m.bound(node, ("input", "dim", "keepdim"), False)
    if args is None or args[2] is not True or m.tensor(args[0]) is None:
        return None
    dims = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    last = g.value(args[0]).dim() - 1
    return args[0] if len(dims) == 1 and dims[0] in (-1, last) else None


def _squared(node: Any) -> fx.Node | None:
    """x, if node is x squared."""
    if g.is_call(node, torch.square, "square") and len(node.args) == 1:
        return node.args[0]
    if g.is_call(node, *_POW) and len(node.args) == 2 and node.args[1] == 2:
        return node.args[0]
    pairs = m.operands(node, m.MUL)
    return pairs[0][0] if pairs and pairs[0][0] is pairs[0][1] else None


def _rewrite(
    gm: fx.GraphModule,
    facts: Facts,
    node: fx.Node,
    top: fx.Node,
    factor: _Factor,
    context: PassContext,
) -> bool:
    x, weight = _weighted(top, factor.squared)
    if x is None:
        return False
    why = _why_not(facts, node, x, weight, top, factor)
    if why is not None:
        context.refused(node, f"RMSNorm written by hand: {why}; left as written")
        return False
    value = g.value(node)
    with gm.graph.inserting_before(node):
        source = m.cast(gm.graph, x, value.dtype, like=node)
        if weight is not None:
            weight = m.cast(gm.graph, weight, value.dtype, like=node)
        args = (source, (int(value.shape[-1]),), weight, factor.eps)
        new = m.call(gm.graph, torch.rms_norm, args, like=node, value=value)
        if value.device.type != "cpu" and value.dtype in (torch.bfloat16, torch.float16):
            # Under autocast torch.rms_norm gives FP32 on other devices; the product did not.
            out = m.call(gm.graph, "to", (new, value.dtype), like=node, value=value)
        else:
            out = new
    context.rewrote(node, "RMSNorm written by hand -> rms_norm")
    facts.replace(node, out)
    mine = [*factor.nodes, *([top] if top is not x else [])]
    for dead in [*reversed(mine), *m.uncast(factor.squared)[1]]:
        if not dead.users:
            gm.graph.erase_node(dead)
    if weight is None:
        _absorb_weight(gm, facts, new, out, context)
    return True


def _weighted(top: fx.Node, squared: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """(x, weight) of the numerator x, or x * weight, when x is what was squared."""
    root = m.uncast(squared)[0]
    if m.uncast(top)[0] is root:
        return top, None
    for x, weight in m.operands(top, m.MUL):
        if isinstance(x, fx.Node) and m.uncast(x)[0] is root and m.parameter(weight) is not None:
            return x, weight
    return None, None


def _why_not(
    facts: Facts,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    top: fx.Node,
    factor: _Factor,
) -> str | None:
    value, given = g.value(node), g.value(x)
    root = m.uncast(x)[0]
    if value.shape != given.shape or not isinstance(given.shape[-1], int):
        return "its shape is not that of its input"
    if g.value(factor.nodes[0]).dtype == torch.float16:
        return "squares are taken in float16, which overflows where rms_norm does not"
    casts = [*m.uncast(x)[1], *m.uncast(factor.squared)[1]]
    if any(not m.holds(g.value(c).dtype, g.value(root).dtype) for c in casts):
        return "a cast in it rounds the input"
    if not m.holds(value.dtype, given.dtype):
        return "the result is narrower than the input"
    if weight is not None and tuple(g.value(weight).shape) != (given.shape[-1],):
        return f"the weight's shape is {tuple(g.value(weight).shape)}"
    inner = [*factor.nodes, *([top] if top is not x else [])]
    reader = m.leak([*inner, node])
    if reader is not None:
        return f"{reader.name} inside it has other readers"
    first = min(inner, key=lambda n: facts.order.get(n, -1))
    return facts.obstacle(first, node, [x, root, factor.squared, weight], inside=inner)


def _absorb_weight(
    gm: fx.GraphModule, facts: Facts, norm: fx.Node, out: fx.Node, context: PassContext
) -> None:
    """rms_norm(x) [cast] * weight -> rms_norm(x, weight) [cast], where the dtypes allow it."""
    tail = out
    while len(tail.users) == 1 and m.is_cast(next(iter(tail.users))):
        tail = next(iter(tail.users))
    if len(tail.users) != 1:
        return
    product = next(iter(tail.users))
    for left, weight in m.operands(product, m.MUL):
        if left is not tail or m.parameter(weight) is None:
            continue
        value = g.value(product)
        if tuple(g.value(weight).shape) != norm.args[1] or value.dtype != g.value(tail).dtype:
            return
        if facts.obstacle(out, product, [norm.args[0], weight], inside=[norm]) is not None:
            return
        with gm.graph.inserting_before(product):
            wide = m.cast(gm.graph, weight, g.value(norm).dtype, like=norm)
            args = (norm.args[0], norm.args[1], wide, norm.args[3])
            new = m.call(gm.graph, torch.rms_norm, args, like=norm, value=g.value(norm))
            if new.meta["example_value"].dtype != value.dtype or out is not norm:
                new = m.call(gm.graph, "to", (new, value.dtype), like=product, value=value)
        context.rewrote(product, "weight multiplied by hand joined to its rms_norm")
        facts.replace(product, new)
        while not tail.users and tail is not norm.args[0]:
            below = tail.args[0]
            gm.graph.erase_node(tail)
            tail = below
        return
