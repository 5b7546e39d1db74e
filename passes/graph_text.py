"""Graph -> canonical text: Python that reads the same for equal graphs."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Iterable
from collections.abc import Iterator
from types import BuiltinFunctionType
from types import FunctionType
from typing import Any

import torch
from torch import fx

from loka_compile.passes.graph import every_graph
from loka_compile.passes.graph import layer_of
from loka_compile.passes.graph import value


def text_of(gm: fx.GraphModule) -> str:
    """Canonical text of a graph and its bodies: shapes and dtypes as comments, no ids, no paths.

    It is Python, and runs below the header that `report/runnable.py` writes.
    """
    lines: list[str] = []
    graphs = list(every_graph(gm))
    names = {id(one): f"body_{i}" if i else "forward" for i, one in enumerate(graphs)}
    for one in graphs:
        lines.append(f"def {names[id(one)]}(")
        lines.extend(_lines(one, names))
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _lines(gm: fx.GraphModule, names: dict[int, str]) -> Iterator[str]:
    nodes = list(gm.graph.nodes)
    for node in nodes:
        if node.op == "placeholder":
            yield f"    {node.name},  # {shape_text(value(node))}"
    yield "):"
    for node in nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            yield f"    return {_show(node.args[0])}"
            continue
        if node.op == "get_attr":
            held = getattr(gm, str(node.target), None)
            call = names.get(id(held), "self." + str(node.target).replace(".", "_"))
        elif node.op == "call_method":
            first, *rest = node.args
            call = f"{_show(first)}.{node.target}({_arguments(rest, node.kwargs)})"
        else:
            call = f"{_target(node.target)}({_arguments(node.args, node.kwargs)})"
        comment = "  # " + ", ".join(x for x in (shape_text(value(node)), layer_of(node)) if x)
        yield f"    {node.name} = {call}{comment}"


def _arguments(args: Iterable[Any], kwargs: dict[str, Any]) -> str:
    shown = [_show(a) for a in args]
    shown += [f"{k}={_show(v)}" for k, v in kwargs.items()]
    return ", ".join(shown)


def _show(arg: Any) -> str:
    if isinstance(arg, fx.Node):
        return arg.name
    if isinstance(arg, (list, tuple)):
        inner = ", ".join(_show(a) for a in arg)
        if isinstance(arg, list):
            return f"[{inner}]"
        return f"({inner},)" if len(arg) == 1 else f"({inner})"
    if isinstance(arg, dict):
        return "{" + ", ".join(f"{k!r}: {_show(v)}" for k, v in arg.items()) + "}"
    if isinstance(arg, slice):
        return f"slice({_show(arg.start)}, {_show(arg.stop)}, {_show(arg.step)})"
    if isinstance(arg, (FunctionType, BuiltinFunctionType)):
        return _target(arg)
    return repr(arg)


#: Names under which the header imports what holds functions.
_HOLDERS = {
    "F": torch.nn.functional,
    "torch": torch,
    "operator": operator,
    "builtins": builtins,
    "torch._C": torch._C,
}


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    name = str(getattr(target, "__name__", target))
    for prefix, holder in _HOLDERS.items():
        if getattr(holder, name, None) is target:
            return f"{prefix}.{name}"
    return f"{getattr(target, '__module__', '') or 'torch'}.{name}"


def shape_text(v: Any) -> str:
    """`float32[4, s0]`, `SymInt s0`, `(float32[4], int64[])`; "" for None."""
    if isinstance(v, torch.Tensor):
        kind = str(v.dtype).removeprefix("torch.")
        return f"{kind}[{', '.join(str(s) for s in v.shape)}]"
    if isinstance(v, (list, tuple)):
        return "(" + ", ".join(map(shape_text, v)) + ")"
    if isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"{type(v).__name__} {v}"
    return "" if v is None else type(v).__name__
