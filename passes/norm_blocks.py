"""Graph -> how wide the blocks of each norm are, in node.meta; nothing else changes.

A norm that a linear feeds, through casts, views and elementwise ops, may end in that linear's GEMM,
whose tile must hold what a statistic runs over: it gets blocks. A norm that no linear feeds (of
products of embeddings, of a graph's input) gains nothing from blocks, and its statistic over the
whole row is nearer to the norm that the model was written with.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from loka_compile.kernels.block_norm import block_of
from loka_compile.passes import graph as g
from loka_compile.passes import matching as m

#: node.meta key under which the decision waits for `block_norm`.
BLOCK = "loka_block"
#: Inner placeholder of a body -> what the call around it passes.
Outer = dict[fx.Node, Any]

#: Bare names of ops whose result has each feature from features of their inputs at the same place,
#: or moved: a linear under them still feeds a norm above.
_THROUGH = {
    *m.CASTS,
    *("contiguous", "clone", "detach", "view", "reshape", "flatten", "unflatten", "permute"),
    *("transpose", "t", "squeeze", "unsqueeze", "expand", "narrow", "cat", "concat"),
    *("concatenate", "stack", "chunk", "split", "tensor_split", "unbind", "getitem"),
    *("add", "sub", "mul", "multiply", "div", "neg", "iadd", "isub", "imul", "itruediv"),
    *("add_", "sub_", "mul_", "div_", "addcmul", "clamp"),
    *("dropout", "alpha_dropout", "feature_alpha_dropout"),
    *("relu", "gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "leaky_relu", "prelu"),
}


def is_norm(node: fx.Node) -> bool:
    """A norm in its canonical spelling, of which `block_norm` may be made."""
    if g.is_call(node, torch.rms_norm):
        return len(node.args) == 4
    return g.is_call(node, F.layer_norm, F.group_norm) and len(node.args) == 5


def features(node: fx.Node) -> Any:
    return g.value(node.args[0]).shape[-1]


def width(node: fx.Node) -> Any:
    """How many features one statistic of a norm runs over; None where that is no number."""
    if g.is_call(node, F.group_norm):
        row, groups = features(node), node.args[1]
        whole = isinstance(row, int) and isinstance(groups, int)
        return row // groups if whole else None  # type: ignore[operator]
    shape: Any = node.args[1]
    return shape[0] if len(shape) == 1 and isinstance(shape[0], int) else None


def over_last(node: fx.Node) -> bool:
    """A norm over the last dimension: of rows, or of groups of a matrix's columns."""
    if g.is_call(node, F.group_norm):
        return g.value(node.args[0]).dim() == 2
    shape: Any = node.args[1]
    return len(shape) == 1


def fed_by_linear(norm: fx.Node, outer: Outer | None = None) -> bool:
    """A linear stands before `norm` with nothing between them but ops that work in place."""
    seen: set[fx.Node] = set()
    stack = [norm.args[0]]
    while stack:
        node = stack.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if m.is_linear(node):
            return True
        if node.op == "placeholder":
            stack.append((outer or {}).get(node))
        elif _passes_through(node):
            stack.extend(node.all_input_nodes)
        elif g.is_call(node, torch.sum, "sum"):
            # Of stacked layers; over features it would be no linear's row any more, but is rare.
            stack.extend(node.all_input_nodes)
    return False


def _passes_through(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    name = str(node.target) if node.op == "call_method" else m.name_of(node)
    return name in _THROUGH


def norms(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, bool]]:
    """(norm, whether a linear feeds it), of `gm` and the bodies below it."""

    def walk(one: fx.GraphModule, outer: Outer) -> Iterator[tuple[fx.Node, bool]]:
        for node in one.graph.nodes:
            if is_norm(node):
                yield node, fed_by_linear(node, outer)
        for call, body in g.bodies(one):
            given = [a for a in call.args if not _is_body(one, a)]
            inner = [n for n in body.graph.nodes if n.op == "placeholder"]
            yield from walk(body, {**outer, **dict(zip(inner, given, strict=False))})

    yield from walk(gm, {})


def _is_body(gm: fx.GraphModule, arg: Any) -> bool:
    return (
        isinstance(arg, fx.Node)
        and arg.op == "get_attr"
        and isinstance(getattr(gm, str(arg.target), None), fx.GraphModule)
    )


def decide(gm: fx.GraphModule, rule: Callable[[str, int, bool], int]) -> dict[str, int]:
    """Ask `rule` (name, width, fed by a linear) for each norm; name -> block, for the plan."""
    found: dict[str, int] = {}
    calls: dict[str, int] = {}
    for node, fed in norms(gm):
        wide = width(node)
        if wide is None:
            continue
        name = g.layer_of(node)
        again = calls[name] = calls.get(name, -1) + 1
        name = f"{name}#{again}" if again else name
        node.meta[BLOCK] = found[name] = rule(name, wide, fed)
    return found


def block_for(node: fx.Node) -> int:
    """What was decided for a norm; by the default rule for one that is new since."""
    if BLOCK in node.meta:
        return int(node.meta[BLOCK])
    return block_of(width(node), fed_by_linear(node))
