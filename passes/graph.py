"""Helpers on FX graphs: private copies, sub-graph bodies, values, canonical text."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from loka_compile import _compat

#: node.meta key under which a GEMM site's name travels through every pass.
SITE = "loka_site"

_BODY_META = ("dynamo_flat_name_to_original_fqn", "dynamo_compile_id", "backend_id")


def own_copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A private copy of `gm` and of the bodies of its higher-order ops; tensors are shared.

    Dynamo re-reads its own graph after the backend returns, so the original must stay untouched.
    `_dynamo_source` is an attribute, not meta: node copies drop it, and AOTAutograd asserts on it.
    """
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(gm.graph, mapping)
    out_node = graph.output(output)
    for old in gm.graph.nodes:
        if old.op == "output":
            out_node.meta = copy.copy(old.meta)
        elif hasattr(old, "_dynamo_source"):
            mapping[old]._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]
    _compat.spell_attributes(graph)
    root = dict(gm.named_children())
    attributes: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op != "get_attr":
            continue
        target = str(node.target)
        value = root.get(target)
        if isinstance(value, fx.GraphModule):
            attributes[target] = own_copy(value)
        else:
            attributes[target] = operator.attrgetter(target)(gm)
    holder = torch.nn.Module()
    for name, value in attributes.items():
        _assign(holder, name, value)
    new = _compat.graph_module(holder, graph, type(gm).__name__)
    new.meta = dict(gm.meta)
    sources = getattr(gm, "_param_name_to_source", None)
    if sources is not None:
        new._param_name_to_source = dict(sources)  # type: ignore[assignment]
    new.train(gm.training)
    return new


def _assign(holder: torch.nn.Module, name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        if not hasattr(holder, part):
            holder.add_module(part, torch.nn.Module())
        holder = getattr(holder, part)
    if isinstance(value, torch.nn.Parameter):
        holder.register_parameter(last, value)
    elif isinstance(value, torch.Tensor):
        holder.register_buffer(last, value)
    else:
        setattr(holder, last, value)


def bodies(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.GraphModule]]:
    """(higher-order node, body) of each sub-graph called from `gm`, not recursive."""
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(
            node.target, torch._ops.HigherOrderOperator
        ):
            continue
        for arg in node.args:
            if isinstance(arg, fx.Node) and arg.op == "get_attr":
                body = getattr(gm, str(arg.target), None)
                if isinstance(body, fx.GraphModule):
                    yield node, body


def every_graph(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """`gm` and all bodies below it, outermost first, each once."""
    seen: set[int] = set()
    stack = [gm]
    while stack:
        one = stack.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        stack.extend(body for _, body in bodies(one))


def value(node: Any) -> Any:
    """The fake value of a node (a FakeTensor, SymInt, ...) or None."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def is_call(node: Any, *targets: Any) -> bool:
    """node is a call_function of one of `targets` (functions) or a call_method (strings)."""
    # A function is never equal to a string; no generator: passes ask a hundred thousand times.
    return (
        isinstance(node, fx.Node)
        and node.op in ("call_function", "call_method")
        and node.target in targets
    )


_VIEWS_OF_A_PARAMETER = ("t", "transpose", "permute", "to", "contiguous", "detach", "T", "mT")


def parameter_of(node: Any) -> fx.Node | None:
    """The placeholder under `node`, seen through transposes and casts; None for anything else."""
    while isinstance(node, fx.Node):
        if node.op == "placeholder":
            return node
        through = (
            is_call(node, *_VIEWS_OF_A_PARAMETER)
            or is_call(node, torch.t, torch.transpose, torch.permute)
            or (is_call(node, getattr) and len(node.args) > 1 and node.args[1] in ("T", "mT"))
        )
        if not through:
            return None
        node = node.args[0]
    return None


def is_transposed(node: Any) -> bool:
    """Does `node` show its parameter (see `parameter_of`) with the two dimensions swapped.

    Counted along the chain, never told from shapes: a square weight looks the same both ways.
    """
    swapped = False
    while isinstance(node, fx.Node) and node.op != "placeholder":
        if is_call(node, "permute", torch.permute):
            given = node.args[1]
            dims = given if isinstance(given, (list, tuple)) else node.args[1:]
            swapped ^= tuple(dims) in ((1, 0), (-1, 0), (1, -2), (-1, -2))
        else:
            turns = is_call(node, "t", "transpose", "T", "mT", torch.t, torch.transpose, getattr)
            swapped ^= turns
        node = node.args[0]
    return swapped


def is_parameter(placeholder: fx.Node) -> bool:
    """A placeholder that stands for an nn.Parameter."""
    return isinstance(value(placeholder), torch.nn.Parameter)


def layer_of(node: fx.Node) -> str:
    """The layer a node belongs to, e.g. `layers.3.mlp`: its site name, else its module path."""
    if SITE in node.meta:
        return str(node.meta[SITE])
    stack = node.meta.get("nn_module_stack")
    if stack:
        return _layer_at(str(next(reversed(stack.values()))[0]))
    return node.name


@functools.lru_cache(maxsize=4096)
def _layer_at(path: str) -> str:
    return re.sub(r"^L\['[^']+'\]\.?", "", path).replace("slf.", "") or "model"


def line_of(node: fx.Node) -> str:
    """`file.py:41` of the user's innermost line that made this node, without its folder."""
    return _line_in(node.meta.get("stack_trace") or "")


@functools.lru_cache(maxsize=4096)
def _line_in(trace: str) -> str:
    frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
    outside = [f for f in frames if "/torch/" not in f[0]] or frames
    if not outside:
        return ""
    path, line = outside[-1]
    return f"{path.rsplit('/', 1)[-1]}:{line}"


def inherit(new: fx.Node, old: fx.Node, example: Any = None) -> fx.Node:
    """Give `new` what `old` knew: layer, source line, site; and its fake value."""
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack", SITE):
        if key in old.meta and key not in new.meta:
            new.meta[key] = old.meta[key]
    new.meta["example_value"] = value(old) if example is None else example
    new.meta.setdefault("loka_from", []).extend([old.name, *old.meta.get("loka_from", [])])
    return new


_MUTATING = re.compile(r"^(?!__).*[^_]_$")


def is_mutation(node: fx.Node) -> bool:
    """An in-place op: `add_`, `x += y`, setitem, out=, or a functional with inplace=True."""
    if node.op == "call_method":
        return node.target == "__setitem__" or _is_in_place_name(str(node.target))
    if node.op != "call_function":
        return False
    if node.kwargs and (node.kwargs.get("inplace") or node.kwargs.get("out") is not None):
        return True
    at = _inplace_at(node.target)
    if at is not None and len(node.args) > at and node.args[at]:
        return True
    return _always_mutates(node.target)


@functools.lru_cache(maxsize=4096)
def _is_in_place_name(name: str) -> bool:
    return bool(_MUTATING.match(name))


@functools.lru_cache(maxsize=4096)
def _always_mutates(target: Any) -> bool:
    name = str(getattr(target, "__name__", ""))
    from_operator = getattr(target, "__module__", "") == "_operator"
    return (
        target is operator.setitem
        or (from_operator and name in _INPLACE_OPERATORS)
        or _is_in_place_name(name)
    )


@functools.lru_cache(maxsize=4096)
def _inplace_at(target: Any) -> int | None:
    """Where a functional takes `inplace`: modules such as nn.Hardswish give it by position."""
    if getattr(target, "__module__", "") != "torch.nn.functional":
        return None
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


_INPLACE_OPERATORS = {
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
    *("iand", "ior", "ixor"),
}
