"""Graph -> training graph in which forward and dgrad share one quantisation of their weight.

Each weight that both read as FP8 is quantised once, in both orientations, by one kernel. Inference
graphs take theirs from the weight cache (`store_weights`).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from loka_compile.lowering import weights
from loka_compile.lowering.epilogue_ops import LINEAR_EPILOGUE
from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes.aliases import Facts
from loka_compile.passes.handover import FUSED
from loka_compile.passes.handover import LINEAR
from loka_compile.passes.handover import set_arguments
from loka_compile.passes.manager import PassContext

QUANTIZE = torch.ops.loka.quantize_weight.default

_WEIGHT: dict[Any, int] = {LINEAR: 1, LINEAR_EPILOGUE: 1, FUSED: 3}
#: Where the op takes (w8, w_scale, w8t, wt_scale).
_PARTS: dict[Any, tuple[int, ...]] = {
    LINEAR: (10, 11, 12, 13),
    LINEAR_EPILOGUE: (10, 11, 12, 13),
    FUSED: (15, 16, 18, 19),
}
_KERNELS: dict[Any, int] = {LINEAR: 3, LINEAR_EPILOGUE: 3, FUSED: 9}
_ROUNDED = (torch.bfloat16, torch.float16)

Key = tuple[fx.Node, torch.dtype, str, str]


class ShareWeights:
    """Runs after `handover`, never in a graph with observers."""

    name = "share_weights"

    def __init__(self, devices: tuple[str, ...] = ("cuda",)) -> None:
        """devices: where one kernel writes both; elsewhere two formulas do as well."""
        self.devices = devices

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        if not torch.is_grad_enabled():
            return
        facts = Facts(gm)
        held: dict[Key, list[fx.Node]] = {}
        for node in list(gm.graph.nodes):
            key = _key(node)
            if key is None or g.value(key[0]).device.type not in self.devices:
                continue
            if facts.written(key[0]) is not None:
                context.refused(node, "weight quantised per direction: the graph writes to it")
                continue
            if key not in held:
                held[key] = _quantize(gm, node, key)
            set_arguments(node, dict(zip(_PARTS[node.target], held[key], strict=True)))
            context.rewrote(node, "quantises its weight once for forward and dgrad")


def _key(node: fx.Node) -> Key | None:
    """(weight, dtype it is taken in, fwd, dgrad) of a linear that gains; else None."""
    if not g.is_call(node, *_WEIGHT):
        return None
    first = _KERNELS[node.target]
    fwd, dgrad = str(node.args[first]), str(node.args[first + 1])
    if weights.scale_of(fwd, "fwd") is None or weights.scale_of(dgrad, "dgrad") is None:
        return None
    x: Any = node.args[0]
    w: Any = node.args[_WEIGHT[node.target]]
    if g.parameter_of(w) is None or not g.value(x).requires_grad:
        # Without a dgrad there is nothing to share.
        return None
    dtype = g.value(w).dtype
    if dtype in _ROUNDED and m.is_cast(w):
        # The kernel rounds on its way: a cast weight is never written.
        w = w.args[0]
    return w, dtype, fwd, dgrad


def _quantize(gm: fx.GraphModule, node: fx.Node, key: Key) -> list[fx.Node]:
    w, dtype, fwd, dgrad = key
    with gm.graph.inserting_before(node):
        plain = m.call(gm.graph, "detach", (w,), like=node)
        both = m.call(gm.graph, QUANTIZE, (plain, dtype, fwd, dgrad), like=node)
        parts = [m.call(gm.graph, operator.getitem, (both, i), like=node) for i in range(4)]
    for new in (plain, both, *parts):
        # The site is the linear alone: reports count nodes by it.
        new.meta.pop(g.SITE, None)
    return parts
