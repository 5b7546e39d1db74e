"""Graph -> the same function with a sum over stacked layers written as sums and products.

    (stack([a, b], d) * weights).sum(d)         weights[0] * a + weights[1] * b

Each of the linears among a, b, ... can then take its weight and the others' sum in. Sums of narrow
parts run in FP32, as a reduction does.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes.aliases import Facts
from loka_compile.passes.manager import PassContext


def spread(gm: fx.GraphModule, context: PassContext) -> None:
    for node in list(gm.graph.nodes):
        args = m.bound(node, ("input", "dim", "keepdim"), False)
        if not g.is_call(node, torch.sum, "sum") or args is None or args[2]:
            continue
        stack, weights = _weighted(args[0])
        parts = _parts(stack)
        if not parts or args[1] not in _spellings(stack) or not any(map(m.is_linear, parts)):
            continue
        why = _why_not(gm, node, args[0], stack, weights, parts)
        if why is None:
            _rewrite(gm, node, stack, weights, parts, context)
        else:
            context.refused(node, f"sum of stacked linears left as written: {why}")


def _weighted(node: Any) -> tuple[Any, fx.Node | None]:
    """(the stack, its weights or None)."""
    for a, b in m.operands(node, m.MUL):
        if g.is_call(a, torch.stack) and m.tensor(b) is not None:
            return a, b
    return node, None


def _parts(stack: Any) -> list[Any]:
    args = m.bound(stack, ("tensors", "dim"), 0) if g.is_call(stack, torch.stack) else None
    return list(args[0]) if args is not None and isinstance(args[0], (list, tuple)) else []


def _dim(stack: fx.Node) -> int:
    args = m.bound(stack, ("tensors", "dim"), 0)
    assert args is not None
    return args[1] % g.value(stack).dim()


def _spellings(stack: fx.Node) -> tuple[Any, ...]:
    dim, rank = _dim(stack), g.value(stack).dim()
    return (dim, dim - rank, (dim,), (dim - rank,), [dim], [dim - rank])


def _axis(stack: fx.Node, weights: fx.Node) -> int | None:
    """The dimension of `weights` that runs over the parts, if all others are 1."""
    shape = list(g.value(weights).shape)
    axis = _dim(stack) - (g.value(stack).dim() - len(shape))
    if axis < 0 or axis >= len(shape) or shape.pop(axis) != g.value(stack).shape[_dim(stack)]:
        return None
    return axis if all(isinstance(s, int) and s == 1 for s in shape) else None


def _why_not(
    gm: fx.GraphModule, node: fx.Node, product: Any, stack: fx.Node, weights: Any, parts: list[Any]
) -> str | None:
    if len(stack.users) > 1 or len(product.users) > 1:
        return "the stack has other readers"
    if not m.row_major(g.value(node)):
        return "the result follows the strides of another tensor"
    if weights is not None:
        if _axis(stack, weights) is None or not g.value(weights).is_floating_point():
            return "its weights are more than one number per part"
        if all(not m.is_linear(p) or p.args[2] is not None for p in parts):
            return "its weights scale the linears' biases too"
    return Facts(gm).obstacle(stack, node, [*parts, weights])


def _rewrite(
    gm: fx.GraphModule,
    node: fx.Node,
    stack: fx.Node,
    weights: fx.Node | None,
    parts: list[Any],
    context: PassContext,
) -> None:
    graph, dtype = gm.graph, g.value(node).dtype
    wide = dtype if dtype == torch.float64 else torch.float32
    context.rewrote(node, f"sum over {len(parts)} stacked values written as sums")
    total: fx.Node | None = None
    with graph.inserting_before(node):
        for i, part in enumerate(parts):
            one = m.cast(graph, part, wide, like=node)
            if weights is not None:
                weight = m.call(graph, "select", (weights, _axis(stack, weights), i), like=node)
                if g.value(weight).dim():
                    weight = m.call(graph, "reshape", (weight, ()), like=node)
                weight = m.cast(graph, weight, wide, like=node)
                one = m.call(graph, operator.mul, (one, weight), like=node)
            total = one if total is None else m.call(graph, operator.add, (total, one), like=node)
        assert total is not None
        total = m.cast(graph, total, dtype, like=node)
    product = node.all_input_nodes[0]
    node.replace_all_uses_with(total)
    for dead in dict.fromkeys((node, product, stack)):
        graph.erase_node(dead)
