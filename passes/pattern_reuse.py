"""A replacement's canonical graph, made once per form of its arguments, with values for each match.

Equal layers are the rule: making the graph, and its spellings canonical, costs ten times what
putting it into the model's graph does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import fx

from loka_compile.passes import graph as g
from loka_compile.passes.aliases import Facts
from loka_compile.passes.aliases import storages
from loka_compile.passes.pattern_splice import Found
from loka_compile.passes.pattern_splice import results
from loka_compile.passes.pattern_trace import Traced
from loka_compile.passes.pattern_trace import propagate


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
    return tuple(s if isinstance(s, int) else s.node.expr for s in (*value.shape, *value.stride()))


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
