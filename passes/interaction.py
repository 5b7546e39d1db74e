"""Graph -> graph in which a factorisation machine's products, and a linear compression of the same
x, are one op that reads x once.

    t = x.permute(0, 2, 1) @ P      fm = bmm(x, t)                    x (B, n, d), P (n, k)
    c = (x.permute(0, 2, 1) @ L.T).permute(0, 2, 1)                   optional, L (m, n)

-> `loka::interaction(x, P, L)`. The same maths; only for linears that stay in high precision, on a
GPU, where each of these products is bound by the memory that x comes from. What it does not take,
`batched_linear` may.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any
from typing import cast

import torch
from torch import fx

from loka_compile import _compat
from loka_compile.lowering.interaction import INTERACTION
from loka_compile.lowering.interaction import why_not
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes.aliases import Facts
from loka_compile.passes.batched_linear import swapped
from loka_compile.passes.handover import LINEAR
from loka_compile.passes.manager import PassContext

_PRODUCTS = (torch.bmm, torch.matmul, operator.matmul, "bmm", "matmul", "__matmul__")


class Interaction:
    """Runs after `dispatch` and `observe`, before `batched_linear`, on sites not observed."""

    name = "interaction"

    def __init__(self, devices: tuple[str, ...] = ("cuda",)) -> None:
        self.devices = devices

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        if "cuda" in self.devices and _compat.why_no_triton():
            return
        products = [n for n in gm.graph.nodes if _is_product(n)]
        if not products:
            return
        facts = Facts(gm)
        for product in products:
            linear, x = product.args[1], product.args[0]
            if g.value(x).device.type not in self.devices or not _plain(linear):
                continue
            other, why = _found(product, facts, _plain)
            if why:
                context.refused(product, f"separate products: {why}")
                continue
            _rewrite(gm, product, linear, other)
            what = "products of a factorisation machine"
            what += "" if other is None else " and the linear compression beside it"
            context.rewrote(product, f"{what} read their input once")
            _erase([product, linear, *([other] if other is not None else [])])
            facts = Facts(gm)


def would_join(gm: fx.GraphModule, devices: tuple[str, ...] = ("cuda",)) -> list[fx.Node]:
    """The linears of a graph that is still observed which become part of such an op if they stay
    in high precision, whatever their kernels are now."""
    if "cuda" in devices and _compat.why_no_triton():
        return []
    found: list[fx.Node] = []
    facts = Facts(gm)
    for product in gm.graph.nodes:
        if _is_product(product) and g.value(product.args[0]).device.type in devices:
            if not _bare(product.args[1]):
                continue
            other, why = _found(product, facts, _bare)
            if not why:
                found += [product.args[1], *([] if other is None else [other])]
    return found


def _found(
    product: fx.Node, facts: Facts, fits: Callable[[fx.Node], bool]
) -> tuple[fx.Node | None, str | None]:
    """(the compression beside `product`, if there is one that fits; why it is not rewritten)."""
    x, linear = cast("tuple[fx.Node, fx.Node]", product.args)
    if len(linear.users) > 1:
        return None, "the inner product has other readers: not kept to itself"
    other = _compression(x, product, facts, fits)
    weights = [one.args[1] for one in (linear, other) if one is not None]
    why = _why_not(x, *weights)
    if why and other is not None:
        other, weights = None, weights[:1]
        why = _why_not(x, *weights)
    return other, why or _written(facts, product, linear, other, weights)


def _is_product(node: fx.Node) -> bool:
    """bmm(x, linear(x transposed))."""
    if not g.is_call(node, *_PRODUCTS) or len(node.args) != 2 or node.kwargs:
        return False
    x, linear = node.args
    return (
        isinstance(x, fx.Node)
        and isinstance(linear, fx.Node)
        and g.is_call(linear, LINEAR)
        and swapped(linear.args[0]) is x
    )


def _bare(linear: fx.Node) -> bool:
    return linear.args[2] is None


def _plain(linear: fx.Node) -> bool:
    """In high precision, without a bias and without a probe."""
    kernels = cast("tuple[Any, ...]", linear.args[3:6])
    return _bare(linear) and all(k == HIGH_PRECISION for k in kernels) and not linear.args[6]


def _compression(
    x: fx.Node, product: fx.Node, facts: Facts, fits: Callable[[fx.Node], bool]
) -> fx.Node | None:
    """A linear over the transposed x all of whose readers transpose back, near enough to share."""
    for turned in x.users:
        if swapped(turned) is not x:
            continue
        for linear in turned.users:
            if not g.is_call(linear, LINEAR) or not fits(linear) or not linear.users:
                continue
            if any(swapped(u) is not linear for u in linear.users):
                continue
            at = min(product, linear, key=facts.order.__getitem__)
            weights = (cast(fx.Node, product.args[1]).args[1], linear.args[1])
            if all(_hoistable(w, at, facts) for w in weights):
                return linear
    return None


def _hoistable(node: Any, before: fx.Node, facts: Facts) -> bool:
    """`node` stands before `before`, or is views and casts of what does."""
    if facts.order[node] < facts.order[before]:
        return True
    moves = g.is_call(node, "t", torch.t, "transpose", torch.transpose, "to", "permute", "detach")
    return moves and all(_hoistable(one, before, facts) for one in node.all_input_nodes)


def _hoist(node: fx.Node, before: fx.Node, placed: set[fx.Node]) -> None:
    if node in placed:
        return
    for one in node.all_input_nodes:
        _hoist(one, before, placed)
    before.prepend(node)
    placed.add(node)


def _why_not(x: fx.Node, *weights: Any) -> str | None:
    shape, dtype = g.value(x).shape, g.value(x).dtype
    values = [g.value(w) for w in weights]
    if any(v.dtype != dtype for v in values):
        return "its operands have different dtypes"
    n, d = shape[1:]
    k, outputs = values[0].shape[0], values[1].shape[0] if len(values) > 1 else 0
    if any(not isinstance(size, int) for size in (n, d, k, outputs)):
        return "a size other than the batch is dynamic"
    return why_not(n, d, k, outputs, dtype)


def _written(
    facts: Facts, product: fx.Node, linear: fx.Node, other: fx.Node | None, weights: list[Any]
) -> str | None:
    """The rewrite reads all operands where `product` stands."""
    reads = [product.args[0], *weights]
    why = facts.obstacle(linear, product, reads)
    if why or other is None:
        return why
    first, last = sorted((product, other), key=facts.order.__getitem__)
    return facts.obstacle(first, last, reads)


def _rewrite(gm: fx.GraphModule, product: fx.Node, linear: fx.Node, other: fx.Node | None) -> None:
    x = cast(fx.Node, product.args[0])
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    at = product
    if other is not None and order[other] < order[product]:
        at = other
    weight = cast(fx.Node, linear.args[1])
    left = None if other is None else cast(fx.Node, other.args[1])
    placed = {node for node in order if order[node] < order[at]}
    for one in (weight, left):
        if one is not None:
            _hoist(one, at, placed)
    with gm.graph.inserting_before(at):
        p = m.call(gm.graph, "t", (weight,), like=product)
        both = m.call(gm.graph, INTERACTION, (x, p, left), like=product)
        fm = m.call(gm.graph, operator.getitem, (both, 0), like=product)
        product.replace_all_uses_with(fm)
        if other is None:
            return
        c = m.call(gm.graph, operator.getitem, (both, 1), like=other)
    for user in list(other.users):
        user.replace_all_uses_with(c)
        gm.graph.erase_node(user)


def _erase(nodes: list[fx.Node]) -> None:
    """What of `nodes` nobody reads, and what only they read."""
    gone: set[fx.Node] = set()
    while nodes:
        node = nodes.pop()
        if node in gone or node.users or node.op == "placeholder":
            continue
        nodes += node.all_input_nodes
        node.graph.erase_node(node)
        gone.add(node)
