"""Graph -> graph whose linears and last-dimension norms have no bias, except in heads.

The parameters stay where they are (placeholders, state_dict, optimizer); they get no gradient.
"""

from __future__ import annotations

from torch import fx
from torch.nn import functional as F

from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes.manager import PassContext


class StripBias:
    name = "strip_bias"

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        for node in gm.graph.nodes:
            if m.is_linear(node):
                at = 2
                if node.meta.get(g.SITE) in context.heads:
                    continue
            elif g.is_call(node, F.layer_norm, F.group_norm) and len(node.args) == 5:
                # A group norm over other dimensions stays a group norm, with its bias.
                if g.is_call(node, F.group_norm) and not _over_rows(node):
                    continue
                at = 3
            else:
                continue
            bias = node.args[at]
            if bias is None:
                continue
            if m.parameter(bias) is None:
                context.refused(node, "bias is computed, not a parameter: kept")
                continue
            node.args = (*node.args[:at], None, *node.args[at + 1 :])
            context.changed(node, "bias removed")


def _over_rows(node: fx.Node) -> bool:
    x = m.tensor(node.args[0])
    return x is not None and x.dim() == 2
