"""Graph -> graph in which every product with a parameter is F.linear(x, w (N, K), bias or None)."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes.aliases import Facts
from loka_compile.passes.manager import PassContext

_PRODUCTS = {
    torch.matmul: "other",
    operator.matmul: "other",
    torch.mm: "mat2",
    "matmul": "other",
    "__matmul__": "other",
    "mm": "mat2",
}


def products(gm: fx.GraphModule, context: PassContext) -> None:
    """linear with keywords; `x @ w`, matmul, mm and addmm of a parameter stored either way."""
    for node in list(gm.graph.nodes):
        if g.is_call(node, m.LINEAR):
            args = m.bound(node, ("input", "weight", "bias"), None)
            if args is not None and isinstance(args[1], fx.Node):
                node.args, node.kwargs = (args[0], _collapse(args[1]), args[2]), {}
        elif g.is_call(node, torch.addmm, "addmm"):
            _addmm(gm, node, context)
        elif node.op in ("call_function", "call_method") and node.target in _PRODUCTS:
            args = m.bound(node, ("input", _PRODUCTS[node.target]))
            if args is not None and _is_product(*args):
                _rewrite(gm, node, args[0], args[1], None, context)
            elif args is not None and _is_column(*args):
                _rewrite_column(gm, node, args[0], args[1], context)


def biases(gm: fx.GraphModule, context: PassContext) -> None:
    """linear(x, w, None) + b -> linear(x, w, b) where shapes and dtypes make them equal."""
    facts = Facts(gm)
    for node in list(gm.graph.nodes):
        if g.is_call(node, operator.iadd, "add_") and len(node.args) > 1:
            if m.is_linear(node.args[0]) and m.parameter(node.args[1]) is not None:
                context.refused(node, "bias added in place: left as written")
            continue
        for linear, b in m.operands(node, m.ADD):
            if not m.is_linear(linear) or m.parameter(b) is None:
                continue
            why = _why_no_bias(facts, node, linear, b)
            if why is not None:
                context.refused(node, f"bias added by hand: {why}; left as written")
                break
            x, w, _ = linear.args
            context.rewrote(node, "bias added by hand joined to its linear")
            with gm.graph.inserting_before(node):
                # The add may stand outside the layer's module; the site is the linear's.
                new = m.call(gm.graph, m.LINEAR, (x, w, b), like=linear, value=g.value(node))
            facts.replace(node, new)
            gm.graph.erase_node(linear)
            break


def _why_no_bias(facts: Facts, node: fx.Node, linear: fx.Node, b: fx.Node) -> str | None:
    x, w, bias = linear.args
    y, z, value = g.value(linear), g.value(node), g.value(b)
    if bias is not None:
        return "the linear has a bias already"
    if tuple(value.shape) != (y.shape[-1],):
        return f"its shape {tuple(value.shape)} is not ({y.shape[-1]},)"
    if not value.dtype == y.dtype == z.dtype:
        # Joined, a wider bias would be rounded before the sum and the result's dtype would change.
        return f"dtypes differ ({value.dtype} bias, {y.dtype} product)"
    if len(linear.users) > 1:
        return "the sum without bias has other readers"
    return facts.obstacle(linear, node, [x, w, b])


def _addmm(gm: fx.GraphModule, node: fx.Node, context: PassContext) -> None:
    args = m.bound(node, ("input", "mat1", "mat2", "beta", "alpha"), 1, 1)
    if args is None or not _is_product(*args[1:3]):
        return
    b, x, w, beta, alpha = args
    bias = m.tensor(b)
    if bias is None or beta != 1 or alpha != 1:
        return context.refused(node, "addmm with alpha or beta: left as written")
    features = g.value(w).shape[1]
    if tuple(bias.shape) != (features,):
        return context.refused(node, f"addmm of shape {tuple(bias.shape)}, not ({features},)")
    _rewrite(gm, node, x, w, b, context)


def _is_product(x: Any, w: Any) -> bool:
    left, right = m.tensor(x), m.tensor(w)
    return (
        left is not None
        and right is not None
        and left.dim() >= 1
        and right.dim() == 2
        and right.is_floating_point()
        and m.parameter(w) is not None
    )


def _is_column(w: Any, x: Any) -> bool:
    """w @ x of a parameter and columns x (..., K, 1), as TorchRec's full-rank CrossNet has it."""
    right = m.tensor(x)
    if right is None or right.dim() < 2 or not _is_product(x, w):
        return False
    return isinstance(right.shape[-1], int) and right.shape[-1] == 1


def _rewrite_column(
    gm: fx.GraphModule, node: fx.Node, w: Any, x: Any, context: PassContext
) -> None:
    with gm.graph.inserting_before(node):
        rows = m.call(gm.graph, "squeeze", (x, -1), like=node)
        # Under autocast the product's dtype, which no cast of this graph shows.
        value = g.value(node).squeeze(-1)
        new = m.call(gm.graph, m.LINEAR, (rows, _collapse(w), None), like=node, value=value)
        new = m.call(gm.graph, "unsqueeze", (new, -1), like=node)
    context.rewrote(node, f"{m.name_of(node)} of a column -> linear")
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)


def _rewrite(
    gm: fx.GraphModule,
    node: fx.Node,
    x: Any,
    w: Any,
    bias: fx.Node | None,
    context: PassContext,
) -> None:
    """`node` is x @ w (+ bias), w (K, N)."""
    with gm.graph.inserting_before(node):
        w = _collapse(w)
        w = w.args[0] if _is_transpose(w) else m.call(gm.graph, torch.t, (w,), like=node)
        new = m.call(gm.graph, m.LINEAR, (x, w, bias), like=node, value=g.value(node))
    context.rewrote(node, f"{m.name_of(node)} -> linear")
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)


def _collapse(w: Any) -> Any:
    """Without pairs of transposes."""
    while _is_transpose(w) and _is_transpose(w.args[0]):
        w = w.args[0].args[0]
    return w


def _is_transpose(node: Any) -> bool:
    """Swaps the two dimensions of a matrix. A spelling that is missed costs a second transpose."""
    value = m.tensor(node)
    if value is None or value.dim() != 2 or node.kwargs:
        return False
    if g.is_call(node, torch.t, "t"):
        return True
    if g.is_call(node, getattr):
        return node.args[1] in ("T", "mT")
    if g.is_call(node, torch.transpose, "transpose", torch.swapaxes, "swapaxes"):
        dims = node.args[1:]
    elif g.is_call(node, torch.permute, "permute"):
        dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else node.args[1:]
        return [d % 2 for d in dims] == [1, 0]
    else:
        return False
    return sorted(d % 2 for d in dims) == [0, 1]
