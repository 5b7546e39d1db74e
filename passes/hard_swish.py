"""Graph -> graph with Hard Swish for every swish, and hard sigmoid in v * sigmoid(norm(v)) gates.

Other activations stay, and so do other sigmoids: outside this gate they are no swish.
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
from loka_compile.passes.block_norm import BLOCK_NORM
from loka_compile.passes.manager import PassContext


class HardSwish:
    """Needs canonical swishes; the gate form needs `block_norm` to have run."""

    name = "hard_swish"

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        # Made at the first gate: most models have none.
        facts: Facts | None = None
        for node in gm.graph.nodes:
            if g.is_call(node, F.silu):
                # F.hardswish has the same arguments, `inplace` included.
                node.target = F.hardswish
                context.changed(node, "silu -> hardswish")
                continue
            sigmoid = _gate(node)
            if sigmoid is None:
                continue
            if len(sigmoid.users) > 1:
                context.refused(node, "gate v * sigmoid(norm(v)): the sigmoid has other readers")
                continue
            norm = normed(sigmoid.args[0])
            assert norm is not None  # _gate found it
            facts = facts or Facts(gm)
            why = facts.obstacle(norm, node, node.args)
            if why is not None:
                context.refused(node, f"gate v * sigmoid(norm(v)): {why}")
                continue
            sigmoid.target = F.hardsigmoid
            context.changed(node, "gate sigmoid -> hardsigmoid")


def _gate(node: fx.Node) -> fx.Node | None:
    """The sigmoid of v * sigmoid(block_norm(v)), seen through casts."""
    for v, other in m.operands(node, m.MUL):
        sigmoid = m.uncast(other)[0]
        if not g.is_call(sigmoid, torch.sigmoid) or len(sigmoid.args) != 1:
            continue
        norm = normed(sigmoid.args[0])
        if norm is not None and m.uncast(norm.args[0])[0] is m.uncast(v)[0]:
            return sigmoid
    return None


def normed(node: Any) -> fx.Node | None:
    """The `loka::block_norm` whose result `node` is, seen through casts."""
    below = m.uncast(node)[0]
    if g.is_call(below, operator.getitem) and below.args[1] == 0:
        norm = below.args[0]
        if g.is_call(norm, BLOCK_NORM):
            return norm
    return None
