"""Graph -> training graph in which forward and dgrad share one quantisation of their weight.

Each weight that both read as FP8 is quantised once, in both orientations, and several of them by
one op (`lowering.weight_groups`). Inference graphs take theirs from the weight cache
(`store_weights`).
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import torch
from torch import fx

from loka_compile.lowering import weight_groups
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
QUANTIZE_ALL = torch.ops.loka.quantize_weights.default

_WEIGHT: dict[Any, int] = {LINEAR: 1, LINEAR_EPILOGUE: 1, FUSED: 3}
#: Where the op takes (w8, w_scale, w8t, wt_scale).
_PARTS: dict[Any, tuple[int, ...]] = {
    LINEAR: (10, 11, 12, 13),
    LINEAR_EPILOGUE: (10, 11, 12, 13),
    FUSED: (15, 16, 18, 19),
}
_KERNELS: dict[Any, int] = {LINEAR: 3, LINEAR_EPILOGUE: 3, FUSED: 9}
_ROUNDED = (torch.bfloat16, torch.float16)
_DTYPES = (*_ROUNDED, torch.float32)
#: Views that cost nothing to take once more.
_VIEWS = ("t", "transpose", "permute", "detach", torch.t, torch.transpose, torch.permute, getattr)


class Key(NamedTuple):
    """dtype: in which the weight is taken."""

    w: fx.Node
    dtype: torch.dtype
    fwd: str
    dgrad: str


class ShareWeights:
    """Runs after `handover`. Beside observers, too, which do not look at quantised weights."""

    name = "share_weights"

    def __init__(self, devices: tuple[str, ...] = ("cuda",)) -> None:
        """devices: where one kernel writes both; elsewhere two formulas do as well."""
        self.devices = devices

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        if not torch.is_grad_enabled():
            return
        facts = Facts(gm)
        readers: dict[Key, list[fx.Node]] = {}
        for node in gm.graph.nodes:
            key = _key(node)
            if key is None or g.value(key.w).device.type not in self.devices:
                continue
            if facts.written(key.w) is not None:
                context.refused(node, "weight quantised per direction: the graph writes to it")
                continue
            readers.setdefault(key, []).append(node)
        for group in _groups(readers, facts):
            first = readers[group[0]][0]
            quantize = _quantize if len(group) == 1 else _quantize_all
            with gm.graph.inserting_before(first):
                made = quantize(gm.graph, group, first, facts)
            for key, parts in zip(group, made, strict=True):
                for node in readers[key]:
                    set_arguments(node, dict(zip(_PARTS[node.target], parts, strict=True)))
                    what = "" if len(group) == 1 else f", beside {len(group) - 1} others"
                    context.rewrote(node, f"quantises its weight once for forward and dgrad{what}")


def _key(node: fx.Node) -> Key | None:
    """Of a linear that gains; else None."""
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
    return Key(w, dtype, fwd, dgrad)


# -- groups ---------------------------------------------------------------------------------------


def _groups(readers: Mapping[Key, Sequence[fx.Node]], facts: Facts) -> list[list[Key]]:
    """What one op quantises each, in the order of their first readers, of bounded size."""
    found: list[list[Key]] = []
    #: What weights of one group have in common -> the group that grows, its first reader, its size.
    growing: dict[Hashable, tuple[list[Key], fx.Node, int]] = {}
    for key, nodes in readers.items():
        alike = _alike(key)
        if alike is None:
            found.append([key])
            continue
        n, k = g.value(key.w).shape
        size = 2 * n * k
        group, first, held = growing.get(alike, ([], nodes[0], 0))
        late = not _at_hand(key.w, first, facts)
        if not group or held + size > weight_groups.MOST_BYTES or late:
            group, first, held = [], nodes[0], 0
            found.append(group)
        group.append(key)
        growing[alike] = (group, first, held + size)
    return found


def _alike(key: Key) -> Hashable | None:
    """What the weights of one launch have in common; None for one that is best alone."""
    w = g.value(key.w)
    sizes = (*w.shape, *w.stride())
    if w.dim() != 2 or w.dtype not in _DTYPES or not all(isinstance(s, int) for s in sizes):
        return None
    if 0 in w.shape or 1 not in w.stride():
        return None
    by_row = w.stride(1) == 1
    (_, columns), stride = (w.shape, w.stride(0)) if by_row else (w.shape[::-1], w.stride(1))
    # Reads of 16 bytes at once are for all weights of a launch or for none.
    even = (columns * w.element_size()) % 16 == 0 and (stride * w.element_size()) % 16 == 0
    scales = weights.scales(key.fwd, key.dgrad)
    formats = tuple(scale.dtype for scale in scales)
    # Maxima of rows are gathered by atomics, one switch for a whole launch: others' need none.
    rows = any(scale.kind == "row" for scale in scales)
    return w.device, w.dtype, key.dtype, formats, by_row, even, rows


def _at_hand(w: fx.Node, at: fx.Node, facts: Facts) -> bool:
    """Can `w` be read at `at`: it is there by then, or a view of what is."""
    while facts.order[w] > facts.order[at]:
        if not g.is_call(w, *_VIEWS) or len(w.all_input_nodes) != 1:
            return False
        w = w.all_input_nodes[0]
    return True


def _view(graph: fx.Graph, w: fx.Node, at: fx.Node, facts: Facts) -> fx.Node:
    """`w` where nodes are being inserted, before `at`."""
    if facts.order[w] < facts.order[at]:
        return w
    source = w.all_input_nodes[0]
    new = graph.node_copy(w, {source: _view(graph, source, at, facts)}.__getitem__)
    return _siteless(new)


# -- the ops --------------------------------------------------------------------------------------


def _siteless(new: fx.Node) -> fx.Node:
    """The site is the linear alone: reports count nodes by it."""
    new.meta.pop(g.SITE, None)
    return new


def _quantize(
    graph: fx.Graph, group: Sequence[Key], first: fx.Node, facts: Facts
) -> list[list[fx.Node]]:
    (key,) = group
    plain = _siteless(m.call(graph, "detach", (key.w,), like=first))
    both = _siteless(m.call(graph, QUANTIZE, (plain, *key[1:]), like=first))
    items = [m.call(graph, operator.getitem, (both, i), like=first) for i in range(4)]
    return [[_siteless(one) for one in items]]


def _quantize_all(
    graph: fx.Graph, group: Sequence[Key], first: fx.Node, facts: Facts
) -> list[list[fx.Node]]:
    plain = []
    for key in group:
        w = _view(graph, key.w, first, facts)
        plain.append(_siteless(m.call(graph, "detach", (w,), like=first)))
    fwd, dgrad = [key.fwd for key in group], [key.dgrad for key in group]
    sizes = [size for key in group for size in (*g.value(key.w).shape, *g.value(key.w).stride())]
    args: tuple[Any, ...] = (plain, group[0].dtype, fwd, dgrad, sizes)
    made = _siteless(m.call(graph, QUANTIZE_ALL, args, like=first))
    q, qt, scales = (
        _siteless(m.call(graph, operator.getitem, (made, i), like=first)) for i in range(3)
    )
    shapes = [tuple(g.value(key.w).shape) for key in group]
    found = []
    for four in weight_groups.places(shapes, fwd, dgrad):
        views = []
        for place, whole in zip(four, (q, scales, qt, scales), strict=True):
            args = (whole, place.shape, place.strides, place.offset)
            views.append(_siteless(m.call(graph, torch.as_strided, args, like=first)))
        found.append(views)
    return found
