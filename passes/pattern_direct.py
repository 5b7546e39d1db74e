"""A torch function -> its graph, recorded by one call with proxies; None where Dynamo has to look.

Dynamo takes some 50 ms for a function of one line, a call with proxies a fraction of one. The two
see the same where a function does nothing but call torch functions and methods of a known list on
its arguments: no size, dtype or mode is read, no helper called, nothing closed over or written.
Such a graph also holds for all sizes and under all modes.
"""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from loka_compile.passes import graph as g

#: Functions and methods that Dynamo writes into a graph as they are called, under these names.
_NAMES = {
    *("linear", "layer_norm", "group_norm", "rms_norm", "silu", "relu", "gelu", "sigmoid", "tanh"),
    *("hardswish", "hardsigmoid", "relu6", "softmax", "cat", "stack", "add", "sub", "mul", "div"),
    *("neg", "matmul", "exp", "sin", "cos", "square", "sqrt", "rsqrt", "addcmul", "flatten"),
    *("to", "float", "double", "half", "bfloat16", "mean", "sum", "transpose", "reshape"),
}
#: On the way to them, and to our own ops.
_PATHS = {"nn", "functional", "ops", "loka", "default"}
_OPERATORS = {"add", "sub", "mul", "truediv", "matmul", "neg", "pow", "getitem"}
#: What makes a call depend on more than its arguments, or do more than give a result.
_NOT_PLAIN = (
    *("LOAD_DEREF", "LOAD_CLOSURE", "MAKE_FUNCTION", "MAKE_CELL", "IMPORT_NAME", "YIELD_VALUE"),
    *("STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "SETUP_WITH", "BEFORE_WITH"),
)


def record(function: Callable[..., Any], values: Sequence[Any]) -> fx.GraphModule | None:
    """The graph of `function`, whose placeholders are the tensors among `values`, in order."""
    if not _is_plain(function):
        return None
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    names = inspect.signature(function).parameters
    given = {
        name: tracer.proxy(graph.placeholder(name)) if isinstance(v, torch.Tensor) else v
        for name, v in zip(names, values, strict=True)
    }
    positional = [v for n, v in given.items() if names[n].kind is not names[n].KEYWORD_ONLY]
    named = {n: v for n, v in given.items() if names[n].kind is names[n].KEYWORD_ONLY}
    try:
        result = function(*positional, **named)
        several = isinstance(result, (list, tuple))
        graph.output(tracer.create_arg(tuple(result) if several else (result,)))
    except Exception:
        return None  # whatever it was, Dynamo says it better
    if not all(_is_known(n) for n in graph.nodes):
        return None
    graph.eliminate_dead_code()
    return fx.GraphModule({}, graph)


def _is_plain(function: Callable[..., Any]) -> bool:
    if not isinstance(function, types.FunctionType) or function.__closure__:
        return False
    for step in dis.get_instructions(function):
        if step.opname in _NOT_PLAIN or step.opname.startswith("INPLACE"):
            return False
        if step.opname == "BINARY_OP" and step.argrepr.endswith("="):
            return False  # `x += y`, which a proxy takes for `x + y`
        name = str(step.argval)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and not _is_torch(
            function.__globals__.get(name)
        ):
            return False
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            known = name in _NAMES or name in _PATHS
            if not known:
                return False
    return True


def _is_torch(value: Any) -> bool:
    return value is torch or value is F or isinstance(value, torch._ops.OpOverload)


def _is_known(node: fx.Node) -> bool:
    if g.is_mutation(node):
        return False
    if node.op != "call_function":
        return node.op in ("placeholder", "output") or node.target in _NAMES
    if isinstance(node.target, types.FunctionType):
        # Called through a proxy, it passes all of its keywords on, where Dynamo keeps those given.
        defaults = inspect.signature(node.target).parameters
        node.kwargs = {k: v for k, v in node.kwargs.items() if v != defaults[k].default}
    if isinstance(node.target, torch._ops.OpOverload):
        return True
    if node.target.__module__ == "_operator" and None in node.args:
        return False  # which fails when it is run
    name = getattr(node.target, "__name__", "")
    return name in (_OPERATORS if node.target.__module__ == "_operator" else _NAMES)
