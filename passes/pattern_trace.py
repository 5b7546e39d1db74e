"""A torch function and values -> its graph, as Dynamo would hand it to the backend, canonical.

Works inside a backend call: Dynamo may be entered again. Sizes that are symbolic stay so.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import types
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true

from loka_compile import _compat
from loka_compile.lowering import ops
from loka_compile.options import Options
from loka_compile.passes import graph as g
from loka_compile.passes import known_values
from loka_compile.passes import matching as m
from loka_compile.passes import pattern_direct
from loka_compile.passes.canonicalize import Canonicalize
from loka_compile.passes.manager import PassContext


class NotTraceableError(Exception):
    """A pattern's or replacement's function cannot be used; the message says why."""


@dataclass(frozen=True, eq=False)
class Traced:
    """Raw graph of one function; each placeholder is an argument or a size of one."""

    gm: fx.GraphModule
    #: placeholder name -> (position of the argument, None or the dimension whose size it is)
    sources: dict[str, tuple[int, int | None]]
    #: What the trace took for granted of symbolic sizes, in its own symbols.
    conditions: tuple[Any, ...]
    #: symbol -> (position of the argument, dimension)
    symbols: dict[Any, tuple[int, int]]

    def copy(self, values: Sequence[Any]) -> tuple[fx.GraphModule, dict[fx.Node, Any]]:
        """(canonical copy that carries the fake values of a run on `values`, its inputs' sources).

        Runs under the autocast and grad mode in force. Canonicalize treats an argument as a
        parameter where its value is one.
        """
        why = self.why_not(values)
        if why is not None:
            raise NotTraceableError(why)
        gm = g.own_copy(self.gm)
        inputs = {n: self.sources[n.name] for n in gm.graph.nodes if n.op == "placeholder"}
        for node, (position, dim) in inputs.items():
            value = values[position]
            node.meta["example_value"] = value if dim is None else value.shape[dim]
        propagate(gm, values)
        Canonicalize()(gm, PassContext(Options()))
        gm.graph.eliminate_dead_code()
        gm.graph.lint()
        return gm, inputs

    def why_not(self, values: Sequence[Any]) -> str | None:
        """Conditions that the values' own symbols do not fulfil would be guards: refused."""
        sizes = {s: values[position].shape[dim] for s, (position, dim) in self.symbols.items()}
        known = {
            s: sympy.Integer(v) if isinstance(v, int) else v.node.expr for s, v in sizes.items()
        }
        environments = [v.node.shape_env for v in sizes.values() if not isinstance(v, int)]
        for condition in self.conditions:
            expression = condition.xreplace(known)
            if expression.free_symbols and environments:
                holds = statically_known_true(environments[0].create_symboolnode(expression))
            else:
                holds = bool(expression)
            if not holds:
                return f"branches on a symbolic size ({expression})"
        return None

    @property
    def reads_sizes(self) -> bool:
        """Some call is given, or gives, a size that was no number when this was traced."""
        sized = (torch.Size, torch.SymInt, torch.SymBool, torch.SymFloat, int)
        for node in self.gm.graph.nodes:
            value = g.value(node)
            if node.op == "placeholder" and self.sources[node.name][1] is not None and node.users:
                return True
            if node.op in ("call_function", "call_method") and isinstance(value, sized):
                return True
        return False


def names_of(function: Callable[..., Any], *, constants: bool = False) -> tuple[str, ...]:
    """Argument names: plain positional ones, and `constants` that are given by keyword only."""
    if not inspect.isfunction(function):
        raise NotTraceableError("must be a plain Python function (def or lambda)")
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not constants:
            raise NotTraceableError("only plain positional arguments are supported")
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            raise NotTraceableError("only plain positional arguments are supported")
    return tuple(p.name for p in parameters)


def constants_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Arguments of a replacement by keyword only: constants that its `when` gives."""
    if not inspect.isfunction(function):
        return ()
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def trace(function: Callable[..., Any], values: Sequence[Any], *, any_size: bool = False) -> Traced:
    """values: real or fake tensors, of which only metadata is used, and Python scalars.

    any_size: take their sizes for symbols; what is taken for granted of them is in `conditions`.
    """
    names = checked_names(function, values)
    stand_ins = stand_ins_of(values, any_size=any_size)
    named = dict(zip(names, stand_ins, strict=True))
    constants = {name: named.pop(name) for name in constants_of(function)}
    seen: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        seen.append(g.own_copy(gm))
        output = next(n for n in gm.graph.nodes if n.op == "output")
        # Nothing is computed: the stand-ins do not mix with what the function creates.
        fakes = fx.map_arg(output.args[0], g.value)
        return lambda *_: fakes

    config = torch._dynamo.config.patch(
        automatic_dynamic_shapes=False, assume_static_by_default=True
    )
    # Two sizes that happen to be equal here would silently be one symbol.
    duck = fx.experimental._config.patch(use_duck_shape=not any_size)  # type: ignore[attr-defined]
    with config, duck:
        try:
            torch.compile(_fresh(function), backend=keep, fullgraph=True)(
                *named.values(), **constants
            )
        except Exception as error:
            first = str(error).strip().splitlines() or [""]
            raise NotTraceableError(f"cannot be traced: {type(error).__name__}: {first[0]}") from (
                error
            )
    if len(seen) != 1:
        raise NotTraceableError("calls no torch function on its arguments")
    gm = seen[0]
    gm.graph.eliminate_dead_code()
    sources = {n.name: _source(n, names) for n in gm.graph.nodes if n.op == "placeholder"}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            raise NotTraceableError(f"uses {node.target!r}: constants and sub-graphs cannot be")
        if g.is_mutation(node):
            raise NotTraceableError(f"writes in place ({m.name_of(node)})")
    return Traced(gm, sources, *_conditions(gm, sources))


def recorded(function: Callable[..., Any], values: Sequence[Any]) -> Traced | None:
    """The same graph without Dynamo, for all sizes and modes, where a function is plain enough."""
    names = checked_names(function, values)
    gm = pattern_direct.record(function, values)
    if gm is None:
        return None
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return Traced(gm, {n.name: (names.index(str(n.target)), None) for n in nodes}, (), {})


def checked_names(function: Callable[..., Any], values: Sequence[Any]) -> tuple[str, ...]:
    names = names_of(function, constants=True)
    if len(names) != len(values):
        raise NotTraceableError(f"{len(names)} arguments, but the example gives {len(values)}")
    return names


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    off = tuple((kind, False, dtype) for kind, _, dtype in _compat.autocast_state())
    with _compat.restore_autocast(off):
        yield


def stand_ins_of(
    values: Sequence[Any], *, parameters: bool = False, any_size: bool = False
) -> list[Any]:
    """Fakes with the metadata of `values`, in a mode of their own; symbolic sizes are marked."""
    mode = FakeTensorMode()
    return [
        _stand_in(mode, v, parameters, any_size) if isinstance(v, torch.Tensor) else v
        for v in values
    ]


def _stand_in(
    mode: FakeTensorMode, value: torch.Tensor, parameters: bool, any_size: bool
) -> torch.Tensor:
    sizes = [_compat.size_hint(s, fallback=7) for s in value.shape]
    strides = [_compat.size_hint(s, fallback=7) for s in value.stride()]
    with mode, torch.no_grad():
        new = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
        if parameters and value.is_floating_point():
            return torch.nn.Parameter(new)
    new.requires_grad_(value.requires_grad)
    for dim, size in enumerate(value.shape):
        if any_size or (not isinstance(size, int) and not size.node.expr.is_number):
            # Maybe: what the function takes for granted becomes a condition, not an error.
            torch._dynamo.maybe_mark_dynamic(new, dim)
    return new


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo caches per code object; a copy keeps that cache, and its limit, out of the way."""
    assert isinstance(function, types.FunctionType)  # `names_of` made sure
    new = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    new.__kwdefaults__ = function.__kwdefaults__
    return new


def _source(node: fx.Node, names: Sequence[str]) -> tuple[int, int | None]:
    source = _compat.source_name(node) or node.name
    # Torch 2.11 wraps a function of a file that it skips: its arguments are then the wrapper's.
    wrapped = re.match(r"L\['args'\]\[(\d+)\]", source)
    if wrapped is not None and "args" not in names and int(wrapped[1]) < len(names):
        source = f"L['{names[int(wrapped[1])]}']" + source[wrapped.end() :]
    found = re.fullmatch(r"L\['(\w+)'\](?:\.size\(\)\[(\d+)\])?", source)
    if found is None or found[1] not in names:
        raise NotTraceableError(f"reads {source}, which is no argument of it")
    return names.index(found[1]), None if found[2] is None else int(found[2])


def _conditions(
    gm: fx.GraphModule, sources: dict[str, tuple[int, int | None]]
) -> tuple[tuple[Any, ...], dict[Any, tuple[int, int]]]:
    conditions: tuple[Any, ...] = ()
    symbols: dict[Any, tuple[int, int]] = {}
    for node in gm.graph.nodes:
        value = g.value(node)
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            environment = value.fake_mode.shape_env  # type: ignore[attr-defined]
            conditions = tuple(guard.expr for guard in environment.guards)
            for dim, size in enumerate(value.shape):
                if not isinstance(size, int):
                    # As it was made: `expr` shows what Dynamo has found equal since.
                    symbols[size.node._expr] = (sources[node.name][0], dim)
    return conditions, symbols


def propagate(
    gm: fx.GraphModule, values: Sequence[Any], known: Mapping[fx.Node, Any] | None = None
) -> None:
    """Fake values of all calls but the `known`, from the placeholders', in the values' own mode."""
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)
    results: dict[fx.Node, Any] = dict(known or {})

    def load(arg: Any) -> Any:
        return fx.map_arg(arg, results.__getitem__)

    with torch.set_grad_enabled(torch.is_grad_enabled()):
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                results[node] = g.value(node)
            elif node in results:
                node.meta["example_value"] = results[node]
            elif node.op in ("call_function", "call_method"):
                # Fake tensors bring their own mode; to enter it costs more than most calls.
                fakes = any(isinstance(results[n], FakeTensor) for n in node.all_input_nodes)
                with contextlib.nullcontext() if fakes or mode is None else mode:
                    results[node] = result = _run(node, load(node.args), load(node.kwargs))
                node.meta.pop("example_value", None)
                if isinstance(result, (torch.Tensor, torch.SymInt, int, float, tuple, list)):
                    node.meta["example_value"] = result


def _run(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function: Any = ops.DIRECT.get(node.target, node.target)
    if getattr(node.target, "namespace", None) == "loka" and not kwargs:
        return known_values.result_of(node.target, function, args)
    like = known_values.like_input(node.target, args, kwargs)
    return function(*args, **kwargs) if like is None else like
