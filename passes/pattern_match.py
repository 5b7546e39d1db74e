"""A pattern's graph -> where it occurs in a model's graph, by structure.

Targets are compared by what they compute: `a + b`, `torch.add(a, b)` and `a.add(b)` are one,
keywords and defaults are filled in from the op's schema, and `+` and `*` match in either order.
Literals must be equal, sizes in the pattern among them.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from loka_compile.passes import matching as m

Binding = dict[fx.Node, fx.Node]

_NAMES: dict[Any, str] = {
    operator.add: "add", operator.mul: "mul", operator.sub: "sub", operator.truediv: "div",
    operator.matmul: "matmul", operator.pow: "pow", operator.neg: "neg",
    torch.multiply: "mul", torch.subtract: "sub", torch.true_divide: "div",
    F.tanh: "tanh", F.sigmoid: "sigmoid", F.relu: "relu",
    "__add__": "add", "__radd__": "add", "__mul__": "mul", "__rmul__": "mul", "multiply": "mul",
    "__sub__": "sub", "subtract": "sub", "__truediv__": "div", "true_divide": "div",
    "__matmul__": "matmul", "__pow__": "pow", "__neg__": "neg",
}  # fmt: skip
_COMMUTES = ("add", "mul")
#: Methods that take sizes or dimensions one by one or as one tuple.
_VARIADIC = ("view", "reshape", "permute", "expand", "repeat")


@dataclass(frozen=True, eq=False)
class Template:
    """A canonical graph that is looked for: its inputs bind to anything, its calls to equals."""

    gm: fx.GraphModule
    #: Argument name -> placeholder.
    inputs: Mapping[str, fx.Node]
    outputs: tuple[fx.Node, ...]

    @property
    def calls(self) -> list[fx.Node]:
        return [n for n in self.gm.graph.nodes if n.op in ("call_function", "call_method")]


@dataclass
class Search:
    """All occurrences of one template in one graph, from one root at a time."""

    template: Template
    #: What a call computes -> the graph's calls of it.
    index: Mapping[Any, Sequence[fx.Node]]
    #: (node, reason) where the last root failed on a literal only.
    near: tuple[fx.Node, str] | None = None

    def at(self, root: fx.Node) -> Iterator[Binding]:
        """Bindings whose first output is `root`."""
        self.near = None
        yield from self._outputs(0, {}, root)

    def _outputs(self, i: int, binding: Binding, root: fx.Node | None = None) -> Iterator[Binding]:
        if i == len(self.template.outputs):
            yield binding
            return
        wanted = self.template.outputs[i]
        if root is not None:
            candidates: Sequence[fx.Node] = (root,)
        elif wanted in binding:
            candidates = (binding[wanted],)
        else:
            candidates = self.index.get(key_of(wanted), ())
        for node in candidates:
            for found in self._solve(((wanted, node, node),), binding):
                yield from self._outputs(i + 1, found)

    def _solve(
        self, todo: tuple[tuple[Any, Any, fx.Node], ...], binding: Binding
    ) -> Iterator[Binding]:
        """`todo`: (of the pattern, of the graph, the graph's call that this is an argument of)."""
        if not todo:
            yield binding
            return
        (want, have, where), rest = todo[0], todo[1:]
        if isinstance(want, fx.Node):
            yield from self._node(want, have, rest, binding)
        elif isinstance(want, (list, tuple)):
            if isinstance(have, (list, tuple)) and len(have) == len(want):
                parts = tuple((a, b, where) for a, b in zip(want, have, strict=True))
                yield from self._solve((*parts, *rest), binding)
            else:
                self._missed(where, want, have, binding)
        elif type(want) is type(have) and want == have:
            yield from self._solve(rest, binding)
        else:
            self._missed(where, want, have, binding)

    def _node(
        self, want: fx.Node, have: Any, rest: tuple[Any, ...], binding: Binding
    ) -> Iterator[Binding]:
        if not isinstance(have, fx.Node):
            return
        if want in binding:
            if binding[want] is have:
                yield from self._solve(rest, binding)
            return
        bound = {**binding, want: have}
        if want.op == "placeholder":
            if m.tensor(have) is not None:
                yield from self._solve(rest, bound)
            return
        taken = any(v is have for k, v in binding.items() if k.op != "placeholder")
        if taken or have.op not in ("call_function", "call_method"):
            return
        if key_of(want) != key_of(have):
            return
        ours, theirs = arguments(want), arguments(have)
        if len(ours) != len(theirs):
            return
        orders = [theirs]
        if key_of(want) in _COMMUTES and len(theirs) > 1:
            orders.append((theirs[1], theirs[0], *theirs[2:]))
        for order in orders:
            parts = tuple((a, b, have) for a, b in zip(ours, order, strict=True))
            yield from self._solve((*parts, *rest), bound)

    def _missed(self, where: fx.Node, want: Any, have: Any, binding: Binding) -> None:
        """Half of the calls agree and this literal does not: worth a word."""
        agreed = sum(1 for k in binding if k.op != "placeholder")
        if (
            self.near is None
            and not isinstance(have, fx.Node)
            and 2 * agreed >= len(self.template.calls)
        ):
            self.near = (
                where,
                f"{m.name_of(where)} has {have!r} where the pattern has {want!r}",
            )


def index_of(nodes: Sequence[fx.Node]) -> dict[Any, list[fx.Node]]:
    found: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        if node.op in ("call_function", "call_method"):
            found.setdefault(key_of(node), []).append(node)
    return found


# -- one spelling of a call -----------------------------------------------------------------------


def key_of(node: fx.Node) -> Any:
    """What a call computes: the name of a torch function or method, else the target itself."""
    return _key(node.target)


@functools.cache
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
    args, kwargs = node.args, dict(node.kwargs)
    if key in _VARIADIC and len(args) > 1 and not isinstance(args[1], (list, tuple)):
        args = (args[0], tuple(args[1:]))
    if node.target is F.relu:
        args = args[:1]
        kwargs.pop("inplace", None)  # one that writes is a mutation, which no pattern matches
    if "input" in kwargs and isinstance(key, str):
        kwargs["self"] = kwargs.pop("input")
    for parameters in _signatures(key):
        found = _bind(parameters, args, kwargs)
        if found is not None:
            return found
    return (*args, *(v for pair in sorted(kwargs.items()) for v in pair))


#: name, may be given by position, has a default, the default
_Parameter = tuple[str, bool, bool, Any]


def _bind(
    parameters: Sequence[_Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    positional = [p for p in parameters if p[1]]
    keyword_only = [p for p in parameters if not p[1]]
    names = {p[0] for p in parameters}
    given = {p[0] for p in positional[: len(args)]}
    if len(args) > len(positional) or set(kwargs) - names or given & set(kwargs):
        return None
    out = list(args)
    for name, _, has_default, default in (*positional[len(args) :], *keyword_only):
        if name in kwargs:
            out.append(kwargs[name])
        elif has_default:
            out.append(default)
        else:
            return None
    return tuple(out)


@functools.cache
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
