"""Linear -> what stands behind it that `loka::linear_epilogue` can take in: which forms, how far.

    scale * linear + addends -> act -> block_norm -> act -> * factor -> + residual

Each part may be missing; a value may also gate itself, `v * act(block_norm(v))`. Casts stand
anywhere, and one view that splits the features into groups.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes.block_norm import BLOCK_NORM
from loka_compile.passes.chains import REGROUP
from loka_compile.passes.chains import casts_above

_ACTIVATIONS = (
    ("silu", (F.silu,)),
    ("relu", (F.relu, torch.relu, "relu")),
    ("sigmoid", (torch.sigmoid,)),
    ("tanh", (F.tanh, torch.tanh, "tanh")),
    ("hard_swish", (F.hardswish,)),
    ("hard_sigmoid", (F.hardsigmoid,)),
)


@dataclass
class Epilogue:
    """One match. `nodes` run from the linear up to the result, which is the last one."""

    linear: fx.Node
    nodes: list[fx.Node]
    view: fx.Node | None = None
    scale: fx.Node | None = None
    addends: list[fx.Node] = field(default_factory=list)
    pre: str = "none"
    norm: fx.Node | None = None
    act: str = "none"
    gate: bool = False
    factor: fx.Node | None = None
    residual: fx.Node | None = None

    @property
    def last(self) -> fx.Node:
        return self.nodes[-1]

    @property
    def only_sums(self) -> bool:
        """Nothing but sums so far: one more is one more addend."""
        return self.pre == self.act == "none" and self.norm is None and self.only_linear_act

    @property
    def only_linear_act(self) -> bool:
        return not self.gate and self.factor is None and self.residual is None

    @property
    def operands(self) -> list[fx.Node]:
        """What it reads of the value's own shape."""
        return [n for n in (*self.addends, self.factor, self.residual) if n is not None]

    def __str__(self) -> str:
        parts = ["linear"]
        parts += ["bias"] if self.linear.args[2] is not None else []
        parts += ["scale"] if self.scale is not None else []
        parts += ["addend"] * len(self.addends)
        parts += [] if self.pre == "none" else [self.pre]
        parts += [] if self.norm is None else [f"block_norm({self.norm.args[2]})"]
        parts += [] if self.act == "none" else [f"{self.act} gate" if self.gate else self.act]
        parts += ["factor"] if self.factor is not None else []
        parts += ["residual"] if self.residual is not None else []
        return " + ".join(parts)


def forms(linear: fx.Node) -> list[Epilogue]:
    """All forms that begin at this linear, longest first."""
    found: list[Epilogue] = []
    chain = Epilogue(linear, [linear])
    dtype = g.value(linear).dtype
    node, passed = linear, list[fx.Node]()
    while True:
        if _passes(node, chain, passed, dtype):
            (node,) = node.users
            passed.append(node)
            continue
        behind = replace(chain, nodes=[*chain.nodes, *passed], view=_view(passed) or chain.view)
        longer = _gate(behind, node, dtype) or _step(behind, node, dtype)
        if longer is None:
            break
        chain, passed = longer, []
        node = chain.last
        found.append(chain)
    return [replace(f, nodes=[*f.nodes, *casts_above(f.last, dtype)]) for f in reversed(found)]


def _passes(node: fx.Node, chain: Epilogue, passed: Iterable[fx.Node], dtype: torch.dtype) -> bool:
    """The only reader of `node` is a cast that rounds nothing, or the first view."""
    if len(node.users) != 1:
        return False
    (reader,) = node.users
    if m.tensor(reader) is None or reader.args[0] is not node:
        return False
    if m.is_cast(reader):
        return len(reader.all_input_nodes) == 1 and m.holds(g.value(reader).dtype, dtype)
    first = chain.view is None and _view(passed) is None
    return first and g.is_call(reader, *REGROUP) and splits(reader, chain.linear)


def _view(nodes: Iterable[fx.Node]) -> fx.Node | None:
    return next((n for n in nodes if not m.is_cast(n)), None)


def splits(view: fx.Node, linear: fx.Node) -> bool:
    """`view` shows the linear's (..., N) as (..., groups, width)."""
    old, new = g.value(linear).shape, g.value(view).shape
    whole = len(new) == len(old) + 1 and all(isinstance(s, int) for s in new[-2:])
    same = whole and all(_same(a, b) for a, b in zip(old, new[:-2], strict=False))
    return bool(same and new[-1] * new[-2] == old[-1])


def _step(chain: Epilogue, node: fx.Node, dtype: torch.dtype) -> Epilogue | None:
    """`chain` with the one reader of `node` taken in."""
    if len(node.users) != 1:
        return None
    (reader,) = node.users
    if g.is_call(reader, BLOCK_NORM):
        return _with_norm(chain, node, reader)
    value = m.tensor(reader)
    if value is None or g.is_mutation(reader) or not m.holds(value.dtype, dtype):
        return None
    longer = replace(chain, nodes=[*chain.nodes, reader])
    act = activation(reader)
    if act is not None:
        # Behind a factor or a sum that follows an activation it would be a third one.
        fits = chain.act == "none" and chain.only_linear_act
        return replace(longer, act=act) if fits else None
    other = _other(reader, node, m.MUL)
    if other is not None:
        if g.value(other).dim() == 0:
            alone = chain.only_sums and not chain.addends and chain.linear.args[2] is None
            return replace(longer, scale=other) if alone and chain.scale is None else None
        fits = chain.only_linear_act and _same_shape(node, other, reader)
        return replace(longer, factor=other) if fits else None
    other = _other(reader, node, m.ADD)
    if other is None or not _same_shape(node, other, reader):
        return None
    if chain.only_sums:
        return replace(longer, addends=[*chain.addends, other])
    return replace(longer, residual=other) if chain.residual is None else None


def _with_norm(chain: Epilogue, node: fx.Node, norm: fx.Node) -> Epilogue | None:
    items = list(norm.users)
    one = len(items) == 1 and g.is_call(items[0], operator.getitem) and items[0].args[1] == 0
    pre = chain.act
    fits = chain.pre == "none" and chain.norm is None and chain.only_linear_act
    if not (one and fits and norm.args[0] is node and m.tensor(node) is not None):
        return None
    if why_no_groups(chain.linear, norm) is not None:
        return None
    return replace(chain, nodes=[*chain.nodes, norm, items[0]], norm=norm, pre=pre, act="none")


def _gate(chain: Epilogue, node: fx.Node, dtype: torch.dtype) -> Epilogue | None:
    """v * act(block_norm(v)) of the value v so far, which the two read, through casts or not."""
    if not chain.only_sums or len(node.users) < 2:
        return None
    for norm, casts in _normed(node):
        items = list(norm.users)
        if len(items) != 1 or why_no_groups(chain.linear, norm) is not None:
            continue
        slope, more = items[0], casts_above(items[0], dtype)
        reader = _only_reader((more or [slope])[-1])
        act = None if reader is None else activation(reader)
        if act is None or reader is None:
            continue
        top = [reader, *casts_above(reader, dtype)]
        product = _only_reader(top[-1])
        for v, other in m.operands(product, m.MUL):
            below, wide = m.uncast(v)
            if other is top[-1] and below is m.uncast(node)[0] and product is not None:
                inner = dict.fromkeys([*casts, *wide, norm, slope, *more, *top, product])
                rest = [n for n in inner if n not in chain.nodes]
                nodes = [*chain.nodes, *rest]
                return replace(chain, nodes=nodes, norm=norm, act=act, gate=True)
    return None


def _normed(node: fx.Node) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """(block_norm of `node`, casts in between)."""
    for user in node.users:
        if g.is_call(user, BLOCK_NORM):
            yield user, []
        elif m.is_cast(user):
            yield from ((norm, [user, *casts]) for norm, casts in _normed(user))


def activation(node: fx.Node) -> str | None:
    """The name in `lowering.activations` of what a node computes."""
    if g.is_mutation(node) or m.tensor(node.args[0] if node.args else None) is None:
        return None
    for name, targets in _ACTIVATIONS:
        if g.is_call(node, *targets):
            return name
    if g.is_call(node, F.gelu, torch._C._nn.gelu):
        how = node.kwargs.get("approximate", "none")
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(str(how))
    return None


def _other(reader: fx.Node, node: fx.Node, targets: tuple[Any, ...]) -> fx.Node | None:
    """The tensor that `reader` joins `node` with; None for a number, or the node itself."""
    for a, b in m.operands(reader, targets):
        other = m.tensor(b)
        if a is node and b is not node and other is not None and other.is_floating_point():
            return b if other.device == g.value(node).device else None
    return None


def _same_shape(node: fx.Node, other: fx.Node, result: fx.Node) -> bool:
    """The value so far has the result's shape; `other` has it too, or one column of it."""
    shapes = [g.value(n).shape for n in (node, other, result)]
    if len({len(s) for s in shapes}) > 1:
        return False
    value, operand, whole = shapes
    lead = all(_same(x, y) for s in (value, operand) for x, y in zip(s[:-1], whole, strict=False))
    # A sum or product with one column may make the result wider than the linear.
    return (
        lead
        and _same(value[-1], whole[-1])
        and (_same(operand[-1], 1) or _same(operand[-1], whole[-1]))
    )


def _same(a: Any, b: Any) -> bool:
    return bool(statically_known_true(a == b))


def why_no_groups(linear: fx.Node, norm: fx.Node) -> str | None:
    """Why a norm behind a linear does not run over the linear's features, or groups of them."""
    features, width = g.value(linear).shape[-1], g.value(norm.args[0]).shape[-1]
    block: Any = norm.args[2]
    if not isinstance(features, int) or not isinstance(width, int):
        return "its width is not a number"
    if features % width:
        return f"the norm runs over {width} features, which do not divide the linear's {features}"
    if features != width and width % block:
        return f"block {block} does not divide the {width} features of a group"
    return None


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
