"""One spelling of a call: what it computes, and all of its arguments in order.

`a + b`, `torch.add(a, b)` and `a.add(b)` are one; keywords and defaults are filled in from the op's
schema; `x.float()` and `x.to(torch.float32)` are one; dimensions are counted from the front.
"""

from __future__ import annotations

import functools
import inspect
import operator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from loka_compile.passes import matching as m

_NAMES: dict[Any, str] = {
    operator.add: "add", operator.mul: "mul", operator.sub: "sub", operator.truediv: "div",
    operator.matmul: "matmul", operator.pow: "pow", operator.neg: "neg",
    torch.multiply: "mul", torch.subtract: "sub", torch.true_divide: "div",
    F.tanh: "tanh", F.sigmoid: "sigmoid", F.relu: "relu",
    F.softmax: "softmax", F.log_softmax: "log_softmax",
    "__add__": "add", "__radd__": "add", "__mul__": "mul", "__rmul__": "mul", "multiply": "mul",
    "__sub__": "sub", "subtract": "sub", "__truediv__": "div", "true_divide": "div",
    "__matmul__": "matmul", "__pow__": "pow", "__neg__": "neg",
}  # fmt: skip
COMMUTES = ("add", "mul")
#: Methods that take sizes or dimensions one by one or as one tuple.
_VARIADIC = ("view", "reshape", "permute", "expand", "repeat")


def key_of(node: fx.Node) -> Any:
    """What a call computes: the name of a torch function or method, else the target itself."""
    if node.op == "call_method" and node.target in m.CASTS and _is_plain_cast(node):
        return "cast"
    return _key(node.target)


def _is_plain_cast(node: fx.Node) -> bool:
    """`x.float()`, `x.to(torch.float32)`, `x.type(dtype=...)`: their result says the dtype."""
    return (
        m.is_cast(node)
        and not any(isinstance(a, fx.Node) for a in (*node.args[1:], *node.kwargs.values()))
        and not any(isinstance(a, bool) and a for a in (*node.args, *node.kwargs.values()))
    )


@functools.lru_cache(maxsize=4096)
def _key(target: Any) -> Any:
    if target in _NAMES:
        return _NAMES[target]
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverloadPacket) and len(target.overloads()) == 1:
        return getattr(target, target.overloads()[0])
    name = str(getattr(target, "__name__", ""))
    if name and target in (getattr(torch, name, None), getattr(torch.Tensor, name, None)):
        return name
    return target


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """Arguments in the schema's order, keywords and defaults filled in."""
    key = key_of(node)
    if key == "cast":
        return node.args[0], m.tensor(node).dtype  # type: ignore[union-attr]
    return _named(node, key)[1]


def _named(node: fx.Node, key: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """(names, values) of all arguments; names are missing where no signature fits."""
    args, kwargs = node.args, dict(node.kwargs)
    if key in _VARIADIC and len(args) > 1 and not isinstance(args[1], (list, tuple)):
        args = (args[0], tuple(args[1:]))
    if node.target is F.relu:
        args = args[:1]
        kwargs.pop("inplace", None)  # one that writes is a mutation, which no pattern matches
    kwargs.pop("_stacklevel", None)
    if "input" in kwargs and isinstance(key, str):
        kwargs["self"] = kwargs.pop("input")
    form = _form(key, len(args), tuple(kwargs))
    if form is None:
        return (), (*args, *(v for pair in sorted(kwargs.items()) for v in pair))
    names, given, defaults = form
    return names, (*args, *(kwargs[n] if n in kwargs else defaults[n] for n in given))


@functools.lru_cache(maxsize=4096)
def _form(
    key: Any, positional: int, keywords: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]] | None:
    """(names of all arguments, of those not given by position, defaults); None: no signature fits.

    Of a call with so many positional arguments and these keywords.
    """
    for parameters in _signatures(key):
        by_position = [p for p in parameters if p[1]]
        names = (*(p[0] for p in by_position), *(p[0] for p in parameters if not p[1]))
        given = set(names[:positional])
        if positional > len(by_position) or set(keywords) - set(names) or given & set(keywords):
            continue
        defaults = {p[0]: p[3] for p in parameters if p[2]}
        left = names[positional:]
        if all(name in keywords or name in defaults for name in left):
            return names, left, defaults
    return None


#: Arguments that count dimensions, of all torch functions.
_DIMENSIONS = {"dim", "dims", "axis", "dim0", "dim1", "axis0", "axis1", "start_dim", "end_dim"}
#: Their dimensions are those of the result, which has one more than the input.
_ONE_MORE = ("stack", "unsqueeze")


def counts_dimensions(node: fx.Node) -> bool:
    """Some argument of the call is a dimension."""
    key = key_of(node)
    return key != "cast" and not _DIMENSIONS.isdisjoint(_named(node, key)[0])


def dimensions(node: fx.Node, values: tuple[Any, ...], at: fx.Node) -> tuple[Any, ...]:
    """`values`, the arguments of `node`, with dimensions counted from the front by `at`'s rank."""
    key = key_of(node)
    if key == "cast":
        return values
    names = _named(node, key)[0]
    if not _DIMENSIONS.intersection(names):
        return values
    source = m.tensor(at if key in _ONE_MORE else _first_tensor(at))
    if source is None:
        return values
    rank = max(source.dim(), 1)
    found = [
        _counted(v, rank) if n in _DIMENSIONS else v for n, v in zip(names, values, strict=True)
    ]
    if key in ("transpose", "swapaxes", "swapdims") and all(type(v) is tuple for v in found[1:]):
        found[1:] = sorted(found[1:])
    return tuple(found)


def _counted(value: Any, rank: int) -> Any:
    given = value if isinstance(value, (list, tuple)) else (value,)
    if any(type(d) is not int for d in given):
        return value
    return tuple(d % rank if -rank <= d < rank else d for d in given)


def _first_tensor(node: fx.Node) -> Any:
    first = node.args[0] if node.args else node.kwargs.get("input")
    return first[0] if isinstance(first, (list, tuple)) and first else first


#: name, may be given by position, has a default, the default
_Parameter = tuple[str, bool, bool, Any]


@functools.lru_cache(maxsize=4096)
def _signatures(key: Any) -> tuple[tuple[_Parameter, ...], ...]:
    if isinstance(key, torch._ops.OpOverload):
        return (_of_schema(key),)
    name = key if isinstance(key, str) else str(getattr(key, "__name__", ""))
    if not isinstance(key, str):
        try:
            return (_of_python(inspect.signature(key)),)
        except (TypeError, ValueError):
            pass
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if packet is None:
        return ()
    return tuple(_of_schema(getattr(packet, o)) for o in packet.overloads() if "out" not in o)


def _of_schema(op: torch._ops.OpOverload) -> tuple[_Parameter, ...]:
    return tuple(
        (a.name, not a.kwarg_only, a.has_default_value(), a.default_value)
        for a in op._schema.arguments
    )


def _of_python(signature: inspect.Signature) -> tuple[_Parameter, ...]:
    return tuple(
        (p.name, p.kind is not p.KEYWORD_ONLY, p.default is not p.empty, p.default)
        for p in signature.parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )
