"""Graph -> graph whose every linear is one `loka::` op that names its three kernels.

High precision is a kernel like any other. The op does not autocast, so the casts that autocast
would make at this node are written out: the dtype that Dynamo's fake value shows for the linear is
the dtype in which it computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import fx

from loka_compile.lowering.epilogue_ops import LINEAR_EPILOGUE
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.libraries.own import WIDEST
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.passes import graph as g
from loka_compile.passes import matching
from loka_compile.passes.manager import PassContext
from loka_compile.passes.pointwise_match import match

LINEAR = torch._C._nn.linear
LOKA_LINEAR = torch.ops.loka.linear.default
FUSED = torch.ops.loka.linear_block_norm_act.default

Kernels = tuple[str, str, str]
ALL_HIGH: Kernels = (HIGH_PRECISION, HIGH_PRECISION, HIGH_PRECISION)


class Dispatch:
    name = "dispatch"

    def __init__(self, kernels: Mapping[str, Kernels]) -> None:
        """`kernels`: site name -> (fwd, dgrad, wgrad); a site that is not in it stays high."""
        self.kernels = kernels
        #: Site -> why its forward stays in high precision all the same.
        self.unfit: dict[str, str] = {}

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        if matching.transformed(gm):
            # vmap and grad transforms have no rule for our ops: every linear stays as written.
            return
        for node in list(gm.graph.nodes):
            if g.is_call(node, FUSED):
                chosen = self._fitting(node, context)
                node.args = (*node.args[:9], *chosen, *node.args[12:])
                context.rewrote(node, _say(chosen))
            elif g.is_call(node, LINEAR_EPILOGUE):
                chosen = self._fitting(node, context)
                node.args = (*node.args[:3], *chosen, *node.args[6:])
                context.rewrote(node, _say(chosen))
            elif g.is_call(node, LINEAR):
                chosen = self._fitting(node, context)
                if self._rewrite(gm, node, chosen, context):
                    context.rewrote(node, _say(chosen))

    def _chosen(self, node: fx.Node) -> Kernels:
        return self.kernels.get(str(node.meta.get(g.SITE)), ALL_HIGH)

    def _fitting(self, node: fx.Node, context: PassContext) -> Kernels:
        """The chosen kernels; a forced or planned kernel that runs chains needs a chain here."""
        fwd, dgrad, wgrad = self._chosen(node)
        if fwd == HIGH_PRECISION:
            return fwd, dgrad, wgrad
        library, _, _ = split_kernel_name(fwd)
        if not library.hands_over:
            return fwd, dgrad, wgrad
        if match(node) is not None:
            # `fuse_pointwise` takes its epilogue in.
            return fwd, dgrad, wgrad
        why = None if g.is_call(node, FUSED) else "it is not part of a fused chain of that form"
        if why is None and cast("int", node.args[5]) > WIDEST:
            why = f"block {node.args[5]} is wider than the {WIDEST} features that one tile holds"
        if why is None:
            return fwd, dgrad, wgrad
        self.unfit[str(node.meta.get(g.SITE))] = f"{fwd}: {why}"
        context.refused(node, f"{fwd}: {why}; its forward stays in high precision")
        return HIGH_PRECISION, dgrad, wgrad

    def _rewrite(
        self, gm: fx.GraphModule, node: fx.Node, chosen: Kernels, context: PassContext
    ) -> bool:
        x, w, bias = cast("tuple[fx.Node, fx.Node, fx.Node | None]", (*node.args, None)[:3])
        y = g.value(node)
        if not isinstance(y, torch.Tensor) or not y.dtype.is_floating_point:
            context.refused(node, "the result is not a floating-point tensor; left as written")
            return False
        if g.value(w).dim() != 2:
            context.refused(node, f"the weight has {g.value(w).dim()} dimensions; left as written")
            return False
        with gm.graph.inserting_before(node):
            x = _cast(gm, x, y.dtype)
            w = _cast(gm, w, y.dtype)
            bias = None if bias is None else _cast(gm, bias, y.dtype)
            new = gm.graph.call_function(LOKA_LINEAR, (x, w, bias, *chosen, [], *((None,) * 7)))
        g.inherit(new, node)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        return True


def _cast(gm: fx.GraphModule, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    value = g.value(node)
    if value.dtype == dtype:
        return node
    new = gm.graph.call_method("to", (node, dtype))
    new.meta["example_value"] = value.to(dtype)
    return new


def _say(chosen: Kernels) -> str:
    if len(set(chosen)) == 1:
        return f"all three: {chosen[0]}"
    return "fwd {}, dgrad {}, wgrad {}".format(*chosen)
