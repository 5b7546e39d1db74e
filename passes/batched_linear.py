"""Graph -> graph in which a linear over a transposed input is a batched product without copies.

`x.permute(0, 2, 1) @ W` maps the middle dimension of x (B, n, d), as Wukong's linear compression
and factorisation machines do. As one GEMM over B * d rows it needs x transposed in memory, and its
reader transposes back; as B products with one shared matrix it reads and writes both as they lie.
Only for sites that stay in high precision, on a GPU, where the copies cost more than the product.
"""

from __future__ import annotations

from typing import Any
from typing import cast

import torch
from torch import fx

from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes.handover import LINEAR
from loka_compile.passes.manager import PassContext

#: Above this many weight elements the product is bound by arithmetic, and one GEMM is better.
MOST_WEIGHTS = 256 * 256


class BatchedLinear:
    """Runs after `dispatch` and `observe`, on sites that are not observed."""

    name = "batched_linear"

    def __init__(self, devices: tuple[str, ...] = ("cuda",)) -> None:
        self.devices = devices

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        for node in list(gm.graph.nodes):
            if not g.is_call(node, LINEAR):
                continue
            below = swapped(node.args[0])
            if below is None or not self._pays(node, below):
                continue
            _rewrite(gm, node, below, context)

    def _pays(self, node: fx.Node, below: fx.Node) -> bool:
        _, w, bias, *kernels = cast("tuple[Any, ...]", node.args[:6])
        if bias is not None or any(k != HIGH_PRECISION for k in kernels) or node.args[6]:
            return False
        weight = g.value(w)
        small = weight.shape[0] * weight.shape[1] <= MOST_WEIGHTS
        return bool(small) and g.value(below).device.type in self.devices


def _rewrite(gm: fx.GraphModule, node: fx.Node, below: fx.Node, context: PassContext) -> None:
    x, w = cast("tuple[fx.Node, fx.Node]", node.args[:2])
    back = list(node.users)
    turned = bool(back) and all(swapped(u) is node for u in back)
    with gm.graph.inserting_before(node):
        batch = m.call(gm.graph, "size", (below, 0), like=node)
        wide = m.call(gm.graph, "unsqueeze", (w, 0), like=node)
        shape: tuple[Any, ...] = (wide, batch, -1, -1)
        every = m.call(gm.graph, "expand", shape, like=node)
        if turned or _readers_take_any_strides(node):
            # (B, N, K) @ (B, K, d): neither the product nor its gradients need a transposed copy.
            new = m.call(gm.graph, torch.bmm, (every, below), like=node)
            if not turned:
                new = m.call(gm.graph, "transpose", (new, 1, 2), like=node)
        else:
            # A reader may count on a dense (B, d, N).
            flat = m.call(gm.graph, "transpose", (every, 1, 2), like=node)
            new = m.call(gm.graph, torch.bmm, (x, flat), like=node)
    context.rewrote(node, "runs as a batched product: no transposed copies")
    if not turned:
        node.replace_all_uses_with(new)
    for user in back if turned else ():
        user.replace_all_uses_with(new)
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)
    if not x.users:
        gm.graph.erase_node(x)


def _readers_take_any_strides(node: fx.Node) -> bool:
    return all(g.is_call(u, torch.bmm, torch.matmul, "bmm", "matmul") for u in node.users)


def swapped(node: Any) -> fx.Node | None:
    """What `node` shows with its last two of three dimensions swapped."""
    if not isinstance(node, fx.Node) or not node.args:
        return None
    below: Any = node.args[0]
    rest: list[Any] = list(node.args[1:])
    value = g.value(below)
    if not isinstance(value, torch.Tensor) or value.dim() != 3:
        return None
    if g.is_call(node, "permute", torch.permute):
        dims = rest[0] if rest and isinstance(rest[0], (list, tuple)) else rest
        swapped = [d % 3 for d in dims] == [0, 2, 1]
    elif g.is_call(node, "transpose", torch.transpose):
        swapped = {d % 3 for d in rest} == {1, 2}
    else:
        swapped = g.is_call(node, getattr) and rest == ["mT"]
    return below if swapped and isinstance(below, fx.Node) else None
