"""Graph -> graph in which our own kernel takes in the exact epilogue of its linear.

    act(linear(x) + bias)    linear(x) + residual    x0 * linear(x) + x    w_i * linear(x) + sum

The same maths in one kernel, with fewer roundings in between; nobody writes the linear's result to
memory. Only for linears whose forward was given to our kernel, which Dispatch offers where such an
epilogue follows: every other graph stays as it was.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from loka_compile.lowering import chain
from loka_compile.lowering import pointwise_autograd  # noqa: F401  (defines the op)
from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes.aliases import Facts
from loka_compile.passes.manager import PassContext
from loka_compile.passes.pointwise_match import LINEAR
from loka_compile.passes.pointwise_match import Match
from loka_compile.passes.pointwise_match import match

OP = torch.ops.loka.linear_pointwise.default


class FusePointwise:
    """Runs last, on `loka::` ops, never in a graph with observers (they read the result)."""

    name = "fuse_pointwise"

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        facts = Facts(gm)
        for node in list(gm.graph.nodes):
            if not g.is_call(node, LINEAR) or not chain.is_own(str(node.args[3])):
                continue
            found = match(node)
            if found is None:
                context.refused(node, "exact epilogue not fused: nothing pointwise reads it alone")
                continue
            why = _why_not(found, facts)
            if why is None:
                _rewrite(gm, found, facts, context)
            else:
                context.refused(node, f"exact epilogue not fused: {why}")


def _why_not(found: Match, facts: Facts) -> str | None:
    x, w, bias = found.linear.args[:3]
    if found.linear.args[6]:
        return "its gradient is observed"
    reads = [x, w, bias, found.mul, found.addend]
    return facts.obstacle(found.linear, found.last, reads, inside=found.nodes, autocast=False)


def _rewrite(gm: fx.GraphModule, found: Match, facts: Facts, context: PassContext) -> None:
    args: Any = found.linear.args
    x, w, bias, *kernels = args[:6]
    # x8, x_scale, x8t, w8, w_scale, w8t, wt_scale: as the linear had them.
    ready = args[7:14]
    new = (x, w, bias, found.mul, found.addend, found.act, *kernels, *ready)
    graph = gm.graph
    with graph.inserting_before(found.last):
        fused = m.call(graph, OP, (*new, torch.is_grad_enabled()), like=found.linear)
        out = m.call(graph, operator.getitem, (fused, 0), like=found.last)
    context.rewrote(fused, f"fused {found}")
    facts.replace(found.last, out)
    for node in sorted(found.nodes[:-1], key=facts.order.__getitem__, reverse=True):
        graph.erase_node(node)
