"""A replacement's function and values -> its graph, made as seldom as can be.

A trace takes some 50 ms and holds for all sizes where no size shows in it. Its canonical graph
takes some ms and holds for equal layers, which are the rule; only values are each match's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import fx

from loka_compile import _compat
from loka_compile.passes import graph as g
from loka_compile.passes.aliases import Facts
from loka_compile.passes.aliases import storages
from loka_compile.passes.pattern_splice import Found
from loka_compile.passes.pattern_splice import results
from loka_compile.passes.pattern_trace import NotTraceableError
from loka_compile.passes.pattern_trace import Traced
from loka_compile.passes.pattern_trace import propagate
from loka_compile.passes.pattern_trace import trace


class Traces:
    """All traces of one replacement, in the whole process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._exact: dict[Any, Traced] = {}
        #: By what a trace for any size depends on; None where there can be none.
        self._general: dict[Any, Traced | None] = {}

    def get(self, values: Sequence[Any]) -> tuple[Traced, Any]:
        """(trace, what decides over it), for these values and under the modes in force.

        Raises NotTraceableError.
        """
        modes = _compat.autocast_state(), torch.is_grad_enabled()
        key = (*map(_metadata, values), modes)
        if key not in self._exact:
            self._exact[key] = self._for_any_size(values, modes) or trace(self._function, values)
        return self._exact[key], key

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

    def renew(self, values: Sequence[Any], found: Found, facts: Facts) -> None:
        """Give the graph the fake values of a run on `values`, in a mode of their own."""
        known: dict[fx.Node, Any] = {}
        for old, new in zip(found.outputs, results(self.gm), strict=False):
            if new in self.fresh and form(g.value(old)) == self.forms[new] and facts.alone(old):
                known[new] = g.value(old)
        for node, (position, dim) in self.sources.items():
            value = values[position]
            node.meta["example_value"] = value if dim is None else value.shape[dim]
        propagate(self.gm, values, known)


@dataclass
class Reuse:
    """Of one pass over one graph: values of several graphs may not be mixed."""

    _ready: dict[Any, Ready] = field(default_factory=dict)

    def get(
        self, key: Any, traced: Traced, values: Sequence[Any], found: Found, facts: Facts
    ) -> Ready:
        """Raises NotTraceableError where the values do not fit the trace."""
        parameters = tuple(isinstance(v, torch.nn.Parameter) for v in values)
        key = key, parameters, tuple(map(_sizes, values))
        ready = self._ready.get(key)
        if ready is None:
            gm, sources = traced.copy(values)
            ready = self._ready[key] = Ready(gm, sources, *_fresh(gm))
        else:
            ready.renew(values, found, facts)
        return ready


def form(value: Any) -> Any:
    """What decides whether one value can stand for another; None where a size is symbolic."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    sizes = (*value.shape, *value.stride())
    if not all(isinstance(s, int) for s in sizes):
        return None
    return type(value), value.dtype, value.device, sizes, len(value.shape), value.requires_grad


def _sizes(value: Any) -> Any:
    """Symbolic sizes by their expressions: two of one name are one within a graph."""
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(map(_expression, (*value.shape, *value.stride())))


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
