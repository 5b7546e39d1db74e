"""A replacement's function and values -> its graph, made as seldom as can be.

A trace takes some 50 ms and holds for all sizes where no size shows in it. Its canonical graph
takes some ms and holds for equal layers, which are the rule; only values are each match's own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import fx

from loka_compile import _compat
from loka_compile.passes import graph as g
from loka_compile.passes import pattern_splice
from loka_compile.passes.aliases import Facts
from loka_compile.passes.aliases import storages
from loka_compile.passes.pattern_splice import Found
from loka_compile.passes.pattern_splice import results
from loka_compile.passes.pattern_trace import NotTraceableError
from loka_compile.passes.pattern_trace import Traced
from loka_compile.passes.pattern_trace import propagate
from loka_compile.passes.pattern_trace import recorded
from loka_compile.passes.pattern_trace import trace


class Traces:
    """All traces of one replacement, in the whole process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._exact: dict[Any, Traced] = {}
        #: By the whole signature of the values: what a replacement of one plain call becomes.
        self.calls: dict[Any, OneCall | None] = {}
        #: By its scalars; None where Dynamo has to look.
        self._plain: dict[Any, Traced | None] = {}
        #: By what a trace for any size depends on; None where there can be none.
        self._general: dict[Any, Traced | None] = {}

    def get(self, values: Sequence[Any]) -> Traced:
        """The trace for these values and under the modes in force. Raises NotTraceableError."""
        modes = modes_in_force()
        key = (*map(_metadata, values), modes)
        if key not in self._exact:
            plain = self._recorded(values)
            found = plain or self._for_any_size(values, modes) or trace(self._function, values)
            self._exact[key] = found
        return self._exact[key]

    def _recorded(self, values: Sequence[Any]) -> Traced | None:
        key = tuple(None if isinstance(v, torch.Tensor) else (type(v), repr(v)) for v in values)
        if key not in self._plain:
            self._plain[key] = recorded(self._function, values)
        return self._plain[key]

    def _for_any_size(self, values: Sequence[Any], modes: Any) -> Traced | None:
        forms = [_sizeless(v) for v in values]
        if None in forms:
            return None
        key = (*forms, modes)
        if key not in self._general:
            self._general[key] = None
            # A function that cannot be traced so may still be traced for one size.
            with contextlib.suppress(NotTraceableError):
                traced = trace(self._function, values, any_size=True)
                self._general[key] = None if traced.reads_sizes else traced
        found = self._general[key]
        return found if found is not None and found.why_not(values) is None else None


def _metadata(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value), repr(value)
    sizes = tuple(s if isinstance(s, int) else str(s) for s in (*value.shape, *value.stride()))
    hints = tuple(_compat.size_hint(s, fallback=7) for s in value.shape)
    return value.dtype, value.device, sizes, hints, value.requires_grad


def _sizeless(value: Any) -> Any:
    """All of `_metadata` but sizes; None where a layout or a symbol could make a difference."""
    if not isinstance(value, torch.Tensor):
        return type(value), repr(value)
    if value.layout is not torch.strided or not _is_plain(value):
        return None
    # Of sizes 0 and 1 Dynamo makes no symbols.
    special = tuple(s if isinstance(s, int) and s < 2 else None for s in value.shape)
    return value.dtype, value.device, special, value.requires_grad


def _is_plain(value: torch.Tensor) -> bool:
    """Contiguous, told without a guard; and no size may turn out to be 0 or 1."""
    wanted: Any = 1
    for size, stride in reversed(tuple(zip(value.shape, value.stride(), strict=True))):
        if not isinstance(size, int) and not size.node.has_hint():
            return False
        if _expression(stride) != wanted:
            return False
        wanted = wanted * _expression(size)
    return True


def _expression(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


@dataclass(frozen=True, eq=False)
class Ready:
    """A replacement's graph as it is to be put in, and where its placeholders come from."""

    gm: fx.GraphModule
    sources: dict[fx.Node, Any]
    #: Results that share memory with nothing else of the graph: whoever they replace has a value
    #: for them. That is most of them, and a value costs as much as all the rest.
    fresh: frozenset[fx.Node]
    forms: dict[fx.Node, Any]

    @functools.cached_property
    def results(self) -> list[Any]:
        return results(self.gm)

    def renew(self, values: Sequence[Any], found: Found, facts: Facts) -> None:
        """Give the graph the fake values of a run on `values`, in a mode of their own."""
        known: dict[fx.Node, Any] = {}
        for old, new in zip(found.outputs, self.results, strict=False):
            if new in self.fresh and form(g.value(old)) == self.forms[new] and facts.alone(old):
                known[new] = g.value(old)
        for node, (position, dim) in self.sources.items():
            value = values[position]
            node.meta["example_value"] = value if dim is None else value.shape[dim]
        propagate(self.gm, values, known)


@dataclass(frozen=True, eq=False)
class OneCall:
    """A replacement that is one plain call: all that is needed of it where its sizes are numbers.

    Without values, so that graphs and threads may share it.
    """

    call: fx.Node
    #: Placeholder -> position of the argument.
    positions: dict[fx.Node, int]
    form: Any

    def replace(self, old: fx.Node, arguments: Sequence[Any]) -> None:
        """Make `old`, whose result has the same form, this call."""
        nodes = {node: arguments[position] for node, position in self.positions.items()}
        pattern_splice.retarget(old, self.call, nodes)


@dataclass
class Reuse:
    """Of one pattern's pass over one graph: values of several graphs may not be mixed."""

    traces: Traces
    #: The modes in force, where the graph switches none.
    modes: Any = None
    _ready: dict[Any, Ready] = field(default_factory=dict)

    def becomes(self, found: Found, arguments: Sequence[Any], values: Sequence[Any]) -> bool:
        """Where a match and its replacement are one plain call each, turn one into the other.

        Raises NotTraceableError where the values do not fit the trace.
        """
        (old, *_) = found.outputs
        mine = form(g.value(old)) if found.plain and old.op == "call_function" else None
        if mine is None:
            return False
        key = (*map(_signature, values), self.modes or modes_in_force())
        known = self.traces.calls
        try:
            if key not in known:
                known[key] = _one_call(*self.traces.get(values).copy(values))
            one = known[key]
        except TypeError:  # a symbolic size, which cannot be hashed
            return False
        if one is None or one.form != mine:
            return False
        one.replace(old, arguments)
        return True

    def get(self, values: Sequence[Any], found: Found, facts: Callable[[], Facts]) -> Ready:
        """The graph with the fake values of a run on `values`.

        Raises NotTraceableError where the values do not fit the trace.
        """
        key = (*map(_symbolic_signature, values), self.modes or modes_in_force())
        ready = self._ready.get(key)
        if ready is not None:
            ready.renew(values, found, facts())
            return ready
        gm, sources = self.traces.get(values).copy(values)
        ready = self._ready[key] = Ready(gm, sources, *_fresh(gm))
        return ready


def _one_call(gm: fx.GraphModule, sources: dict[fx.Node, Any]) -> OneCall | None:
    call = pattern_splice.only_call(gm, sources)
    mine = None if call is None else form(g.value(call))
    if call is None or mine is None:
        return None
    for node in gm.graph.nodes:
        node.meta.pop("example_value", None)
    return OneCall(call, {n: position for n, (position, _) in sources.items()}, mine)


def modes_in_force() -> Any:
    return _compat.autocast_state(), torch.is_grad_enabled()


_INT = {int}


def form(value: Any) -> Any:
    """What decides whether one value can stand for another; None where a size is symbolic."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    sizes = (*value.shape, *value.stride())
    if not _INT.issuperset(map(type, sizes)):
        return None
    return type(value), value.dtype, value.device, sizes, len(value.shape), value.requires_grad


def _signature(value: Any) -> Any:
    """All that a run may depend on."""
    if not isinstance(value, torch.Tensor):
        return type(value), repr(value)
    # As isinstance(value, nn.Parameter) has it, which is slow.
    kind = type(value), getattr(value, "_is_param", False), value.requires_grad
    return value.dtype, value.device, value.shape, value.stride(), kind


def _symbolic_signature(value: Any) -> Any:
    """Sizes by their expressions: two of one name are one within a graph."""
    if not isinstance(value, torch.Tensor):
        return _signature(value)
    dtype, device, shape, stride, kind = _signature(value)
    return dtype, device, tuple(map(_expression, (*shape, *stride))), len(shape), kind


def _fresh(gm: fx.GraphModule) -> tuple[frozenset[fx.Node], dict[fx.Node, Any]]:
    owners: dict[Any, int] = {}
    held = {n: set(storages(g.value(n))) for n in gm.graph.nodes}
    for keys in held.values():
        for one in keys:
            owners[one] = owners.get(one, 0) + 1
    outputs = {n for n in results(gm) if isinstance(n, fx.Node) and n.op != "placeholder"}
    forms = {n: form(g.value(n)) for n in outputs}
    alone = (n for n in outputs if held[n] and all(owners[k] == 1 for k in held[n]))
    return frozenset(n for n in alone if forms[n] is not None), forms
