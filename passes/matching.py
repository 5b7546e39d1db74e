"""What every matcher needs of nodes: values, arguments, casts, readers, new calls."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from loka_compile import _compat
from loka_compile.lowering import ops
from loka_compile.passes import graph as g
from loka_compile.passes import known_values

LINEAR = torch._C._nn.linear
ADD = (operator.add, torch.add, "add", "__add__", "__radd__")
MUL = (operator.mul, torch.mul, torch.multiply, "mul", "multiply", "__mul__", "__rmul__")
DROPOUT = (F.dropout, torch.dropout, F.alpha_dropout, F.feature_alpha_dropout)

CASTS = ("to", "float", "half", "bfloat16", "double", "type", "type_as")


# -- nodes ----------------------------------------------------------------------------------------


def tensor(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node; None for anything else."""
    v = g.value(node)
    return v if isinstance(v, torch.Tensor) else None


def call(
    graph: fx.Graph, target: Any, args: Sequence[Any], *, like: fx.Node, value: Any = None
) -> fx.Node:
    """A new call at the graph's insertion point, with the layer and line of `like`.

    A string target is a method. Its fake value is computed here unless given; give it where an
    autocast context inside the graph would change the result.
    """
    method = isinstance(target, str)
    new = (graph.call_method if method else graph.call_function)(target, tuple(args))
    if value is None:
        # Fake tensors bring their own mode. The tracing context's is another one by now: Dynamo
        # gives the backend a fresh mode, and the two do not mix.
        function = getattr(torch.Tensor, target) if method else ops.DIRECT.get(target, target)
        given = fx.map_arg(tuple(args), g.value)
        ours = getattr(target, "namespace", None) == "loka"
        value = known_values.result_of(target, function, given) if ours else function(*given)
    return g.inherit(new, like, value)


def cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype, *, like: fx.Node) -> fx.Node:
    """`node.to(dtype)`, or `node` itself when it has that dtype."""
    if g.value(node).dtype == dtype:
        return node
    return call(graph, "to", (node, dtype), like=like)


def bound(node: fx.Node, names: Sequence[str], *defaults: Any) -> tuple[Any, ...] | None:
    """Arguments in the order of `names`; `defaults` fill the last ones. None when that fails."""
    args = list(node.args)
    if len(args) > len(names) or set(node.kwargs) - set(names[len(args) :]):
        return None
    first_default = len(names) - len(defaults)
    for i, name in enumerate(names[len(args) :], start=len(args)):
        if name in node.kwargs:
            args.append(node.kwargs[name])
        elif i >= first_default:
            args.append(defaults[i - first_default])
        else:
            return None
    return tuple(args)


def operands(node: Any, targets: Iterable[Any]) -> tuple[tuple[Any, Any], ...]:
    """Both orders of a commutative call's two operands; empty for any other node."""
    if not g.is_call(node, *targets):
        return ()
    args = bound(node, ("input", "other", "alpha"), 1)
    if args is None or args[2] != 1:
        return ()
    a, b = args[:2]
    return ((a, b), (b, a))


def parameter(node: Any) -> fx.Node | None:
    """The placeholder of the nn.Parameter under `node`, through transposes and casts."""
    found = g.parameter_of(node)
    return found if found is not None and g.is_parameter(found) else None


def is_linear(node: Any) -> bool:
    """A linear in its canonical spelling, over a two-dimensional weight."""
    if not g.is_call(node, LINEAR) or len(node.args) != 3 or node.kwargs:
        return False
    w = tensor(node.args[1])
    return w is not None and w.dim() == 2


def is_cast(node: Any) -> bool:
    """A change of floating dtype and of nothing else."""
    if not g.is_call(node, *CASTS) or set(node.kwargs) - {"dtype", "other", "non_blocking"}:
        return False
    old, new = tensor(node.args[0]), tensor(node)
    return (
        old is not None
        and new is not None
        and old.device == new.device
        and old.is_floating_point()
        and new.is_floating_point()
    )


def uncast(node: Any) -> tuple[Any, list[fx.Node]]:
    """(the node below all casts, those casts from the top down)."""
    casts = []
    while is_cast(node):
        casts.append(node)
        node = node.args[0]
    return node, casts


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Without a guard: symbolic sizes are the same when they are spelled alike."""
    return a.dim() == b.dim() and all(map(_same_size, a.shape, b.shape))


def _same_size(a: Any, b: Any) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return bool(a.node.expr == b.node.expr)


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Every value of `narrow` is exact in `wide`."""
    return torch.promote_types(wide, narrow) == wide


def row_major(value: torch.Tensor) -> bool:
    """Strides fall: a pointwise op of it gives a contiguous result."""
    strides = [_compat.size_hint(s, fallback=1) for s in value.stride()]
    return strides == sorted(strides, reverse=True) and (not strides or strides[-1] == 1)


def leak(pattern: Sequence[fx.Node]) -> fx.Node | None:
    """An inner node of a pattern (its last node is the result) that somebody else reads too."""
    inside = set(pattern)
    for node in pattern[:-1]:
        if any(user not in inside for user in node.users):
            return node
    return None


def transformed(gm: fx.GraphModule) -> bool:
    """The graph runs a functorch transform (vmap, grad), for which our ops have no rule."""
    return any("_increment_nesting" in name_of(node) for node in gm.graph.nodes)


def name_of(node: fx.Node) -> str:
    """The bare name of what a node calls."""
    if isinstance(node.target, str):
        return node.target
    return str(getattr(node.target, "__name__", node.target))
