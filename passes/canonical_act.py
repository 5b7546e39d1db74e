"""Graph -> graph with one spelling of swish and sigmoid, and without dropouts that do nothing."""

from __future__ import annotations

import torch
from torch import fx
from torch.nn import functional as F

from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes.aliases import Facts
from loka_compile.passes.manager import PassContext

#: The same functions as newer or inlined code names them.
_ALIASES = {
    torch._C._nn.silu: F.silu,
    torch._C._nn.hardswish: F.hardswish,
    torch._C._nn.hardsigmoid: F.hardsigmoid,
}


def drop_dropouts(gm: fx.GraphModule, context: PassContext) -> None:
    """Dropout with p == 0 or not in training returns its input itself, and so do we.

    A copy would be wrong: eager code that edits the result in place edits the input too.
    """
    for node in list(gm.graph.nodes):
        if not g.is_call(node, F.dropout, torch.dropout):
            continue
        last = "training" if node.target is F.dropout else "train"
        args = m.bound(node, ("input", "p", last, "inplace"), 0.5, True, False)
        if args is None or not isinstance(args[0], fx.Node):
            continue
        source, p, training, _ = args
        # With dynamic=True p is a graph input: nothing can be known about it here.
        if (isinstance(p, (int, float)) and p == 0) or training is False:
            context.rewrote(node, "dropout that does nothing removed")
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)


def swishes(gm: fx.GraphModule, context: PassContext) -> None:
    """F.silu(x) from modules, from the in-place form, and from x*sigmoid(x)."""
    facts = Facts(gm)
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in _ALIASES:
            node.target = _ALIASES[node.target]
        if g.is_call(node, F.sigmoid, "sigmoid") and node.args and not node.kwargs:
            _retarget(gm, facts, node, torch.sigmoid)
        elif g.is_call(node, F.silu):
            _silu(gm, facts, node, context)
    for node in list(gm.graph.nodes):
        _product(gm, facts, node, context)


def _silu(gm: fx.GraphModule, facts: Facts, node: fx.Node, context: PassContext) -> None:
    args = m.bound(node, ("input", "inplace"), False)
    if args is None or not isinstance(args[0], fx.Node):
        return
    source, inplace = args
    if not inplace:
        node.args, node.kwargs = (source,), {}
    elif len(source.users) == 1 and facts.alone(source):
        # Nobody can see the old buffer, so writing to a new one is the same.
        with gm.graph.inserting_before(node):
            new = m.call(gm.graph, F.silu, (source,), like=node)
        context.rewrote(node, "silu out of place")
        facts.replace(node, new)
    else:
        _write_behind(gm, facts, node, source)
        context.rewrote(node, "silu in place -> silu and a copy")


def _write_behind(gm: fx.GraphModule, facts: Facts, node: fx.Node, source: fx.Node) -> None:
    """silu_(x) -> x.copy_(silu(x.clone())): the write that others can see stands by itself.

    The clone is what silu_ itself keeps for its backward; Inductor writes none of the three.
    """
    value = g.value(source)
    with gm.graph.inserting_before(node):
        kept = m.call(gm.graph, "clone", (source,), like=node)
        new = m.call(gm.graph, F.silu, (kept,), like=node)
        written = m.call(gm.graph, "copy_", (source, new), like=node, value=value)
    facts.inserted(kept.prev, node)
    facts.replace(node, written)


def _product(gm: fx.GraphModule, facts: Facts, node: fx.Node, context: PassContext) -> None:
    for x, sigmoid in m.operands(node, m.MUL):
        if not g.is_call(sigmoid, torch.sigmoid) or sigmoid.args != (x,) or x is sigmoid:
            continue
        if m.tensor(x) is None or m.tensor(node) is None:
            return
        if len(sigmoid.users) > 1:
            return context.refused(node, "x * sigmoid(x): the sigmoid has other readers")
        if g.value(node).dtype != g.value(x).dtype:
            return context.refused(node, "x * sigmoid(x): the product changes the dtype")
        why = facts.obstacle(sigmoid, node, [x])
        if why is not None:
            return context.refused(node, f"x * sigmoid(x): {why}")
        context.rewrote(node, "x * sigmoid(x) -> silu")
        with gm.graph.inserting_before(node):
            new = m.call(gm.graph, F.silu, (x,), like=node)
        facts.replace(node, new)
        gm.graph.erase_node(sigmoid)
        return


def _retarget(gm: fx.GraphModule, facts: Facts, node: fx.Node, target: object) -> None:
    with gm.graph.inserting_before(node):
        new = m.call(gm.graph, target, node.args, like=node, value=g.value(node))
    facts.replace(node, new)
