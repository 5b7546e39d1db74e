"""Graph with matches of one user pattern -> graph with its replacement in their place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import fx

from loka_compile.errors import PatternError
from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes import pattern_splice
from loka_compile.passes.aliases import Facts
from loka_compile.passes.graph_text import text_of
from loka_compile.passes.manager import PassContext
from loka_compile.passes.pattern_match import Binding
from loka_compile.passes.pattern_match import Index
from loka_compile.passes.pattern_match import Search
from loka_compile.passes.pattern_match import Template
from loka_compile.passes.pattern_reuse import Reuse
from loka_compile.passes.pattern_reuse import Traces
from loka_compile.passes.pattern_spelling import arguments
from loka_compile.passes.pattern_splice import Found
from loka_compile.passes.pattern_trace import NotTraceableError
from loka_compile.passes.pattern_trace import Traced
from loka_compile.passes.pattern_trace import names_of
from loka_compile.passes.pattern_trace import no_autocast
from loka_compile.passes.pattern_trace import stand_ins_of
from loka_compile.passes.pattern_trace import trace


class Match:
    """What a `when` function may ask about one match; `name` is an argument of the pattern."""

    def __init__(self, found: Found, heads: frozenset[str] = frozenset()) -> None:
        self._inputs, self._literals = found.inputs, found.literals
        #: Does one of the linears that it replaces count as a head.
        self.is_head = any(n.meta.get(g.SITE) in heads for n in found.calls)
        self._result = found.outputs[0]

    @property
    def layer(self) -> str:
        """The layer that the match's result belongs to."""
        return g.layer_of(self._result)

    @property
    def line(self) -> str:
        """The user's line that made the match's result."""
        return g.line_of(self._result)

    def node(self, name: str) -> fx.Node:
        """The graph's node bound to `name`."""
        if name not in self._inputs:
            raise KeyError(f"no argument {name!r}; the pattern has {', '.join(self._inputs)}")
        return self._inputs[name]

    def shape(self, name: str) -> torch.Size:
        """May hold symbolic sizes; a check that branches on one refuses the match."""
        return g.value(self.node(name)).shape

    def dtype(self, name: str) -> torch.dtype:
        return g.value(self.node(name)).dtype

    def is_parameter(self, name: str) -> bool:
        """`name` is an nn.Parameter, maybe transposed or cast, and not computed."""
        return m.parameter(self.node(name)) is not None

    def number(self, name: str) -> int | float:
        """What a free argument is at this match."""
        if name not in self._literals:
            free = ", ".join(self._literals) or "none"
            raise KeyError(f"no free argument {name!r}; free are: {free}")
        return self._literals[name]


@dataclass(eq=False)
class UserPattern:
    """One pattern as a pass. Traced when made: raises PatternError if that fails on the example."""

    name: str
    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    when: Callable[[Match], Any] | None
    example: Sequence[Any]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    #: The replacement computes the same: its uses are rewrites, not changes of the function.
    preserves: bool = False
    #: Names of scalar arguments that bind to any number of their type.
    free: tuple[str, ...] = ()
    #: Text of the functions, for the cache key.
    source: str = ""
    templates: list[Template] = field(init=False)
    _traces: Traces = field(init=False)
    _names: tuple[str, ...] = field(init=False)
    _text: str = field(init=False)

    def __post_init__(self) -> None:
        self.templates, self._text = [], ""
        self._traces = Traces(self.replacement)
        with no_autocast():
            self._trace_pattern()
            self._try_replacement()

    def _trace_pattern(self) -> None:
        try:
            names = self._names = names_of(self.pattern)
            traced = trace(self.pattern, self.example)
        except NotTraceableError as error:
            raise PatternError(self.name, f"the pattern {error}") from error
        # Canonical spellings depend on what is a parameter (x @ w, a bias added by hand).
        switch = next((n for n in traced.gm.graph.nodes if pattern_splice.is_switch(n)), None)
        if switch is not None:
            why = f"the pattern switches grad or autocast modes ({m.name_of(switch)})"
            raise PatternError(self.name, f"{why}: only a replacement may")
        for parameters in (False, True):
            gm, _ = traced.copy(stand_ins_of(self.example, parameters=parameters))
            text = text_of(gm)
            if all(text_of(t.gm) != text for t in self.templates):
                self.templates.append(self._template(gm, traced, names))
                self._text += text

    def _try_replacement(self) -> None:
        values = stand_ins_of(self.example)
        try:
            gm, _ = self._traces.get(values)[0].copy(values)
        except NotTraceableError as error:
            raise PatternError(self.name, f"the replacement {error}") from error
        old = [g.value(n) for n in self.templates[0].outputs]
        why = pattern_splice.difference(old, [g.value(n) for n in pattern_splice.results(gm)])
        if why is not None:
            raise PatternError(self.name, f"on its example, the replacement's {why}")
        self._text += text_of(gm)

    def _template(self, gm: fx.GraphModule, traced: Traced, names: Sequence[str]) -> Template:
        nodes = list(gm.graph.nodes)
        inputs = {names[traced.sources[n.name][0]]: n for n in nodes if n.op == "placeholder"}
        for name, value in zip(names, self.example, strict=True):
            unused = name not in inputs or not inputs[name].users
            if isinstance(value, torch.Tensor) and unused:
                raise PatternError(self.name, f"argument {name!r} is not used by the pattern")
        outputs = pattern_splice.results(gm)
        if not outputs or any(n.op == "placeholder" or m.tensor(n) is None for n in outputs):
            raise PatternError(self.name, "the pattern must return computed tensors")
        return Template(gm, inputs, tuple(outputs), self._free_literals(gm, names))

    def _free_literals(self, gm: fx.GraphModule, names: Sequence[str]) -> dict[Any, str]:
        found: dict[Any, str] = {}
        for name in self.free:
            if name not in names:
                raise PatternError(self.name, f"free={name!r} is no argument of the pattern")
            value = self.example[names.index(name)]
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise PatternError(self.name, f"free argument {name!r} must be an int or a float")
            key = type(value), value
            if key in found:
                why = f"free arguments {found[key]!r} and {name!r} are both {value!r}"
                raise PatternError(self.name, f"{why} in the example: make them differ")
            if key not in _literals_of(gm):
                raise PatternError(self.name, f"{value!r}, free as {name!r}, is not in the pattern")
            found[key] = name
        return found

    def digest(self) -> str:
        """Differs whenever what this pass does may differ."""
        parts = (self.name, self.source, self._text, self.before, self.after)
        return hashlib.sha256(repr((*parts, self.preserves, self.free)).encode()).hexdigest()

    # -- the pass ---------------------------------------------------------------------------------

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        if m.transformed(gm):
            first = next(iter(gm.graph.nodes))
            return context.refused(first, "inside a functorch transform (vmap, grad): left alone")
        index, reuse = Index(gm), Reuse()
        searches = [Search(t, index) for t in self.templates]
        # Made where something matches: most patterns match nothing in most graphs.
        facts: Facts | None = None
        for root in index.of(*(t.root for t in self.templates)):
            if root in index.gone:
                continue
            refusal: tuple[fx.Node, str] | None = None
            for search in searches:
                done = False
                for binding in search.at(root):
                    found = self._found(search.template, binding)
                    if not index.whole(found.calls):
                        continue
                    facts = facts or Facts(gm)
                    why = self._why_not(found, facts, context) or self._apply(
                        gm, found, facts, context, reuse
                    )
                    if why is None:
                        index.gone.update(found.calls)
                        done = True
                        break
                    refusal = refusal or (root, why)
                if done:
                    refusal = None
                    break
                refusal = refusal or search.near
            if refusal is not None:
                context.refused(*refusal)

    def _found(self, template: Template, binding: Binding) -> Found:
        return Found(
            {name: binding[node] for name, node in template.inputs.items()},
            [binding[n] for n in template.calls],
            [binding[n] for n in template.outputs],
            {name: binding[name] for name in template.free.values()},
        )

    def _why_not(self, found: Found, facts: Facts, context: PassContext) -> str | None:
        why = pattern_splice.why_not(found, facts)
        if why is None and self.when is not None:
            with pattern_splice.modes_at(found.last(facts), facts):
                guards = pattern_splice.guards_of(found)
                answer = self.when(Match(found, context.heads))
                if isinstance(answer, str) and answer:
                    return answer
                if not answer:
                    return "its `when` said no"
                if pattern_splice.guards_of(found) != guards:
                    return "its `when` branches on a symbolic size"
        return why

    def _apply(
        self,
        gm: fx.GraphModule,
        found: Found,
        facts: Facts,
        context: PassContext,
        reuse: Reuse,
    ) -> str | None:
        names = self._names
        bound = {**found.inputs, **found.literals}
        nodes = [bound.get(name, value) for name, value in zip(names, self.example, strict=True)]
        values = [g.value(n) if isinstance(n, fx.Node) else n for n in nodes]
        with pattern_splice.modes_at(found.last(facts), facts):
            guards = pattern_splice.guards_of(found)
            try:
                traced, key = self._traces.get(values)
                ready = reuse.get(key, traced, values, found, facts)
            except NotTraceableError as error:
                return f"the replacement {error}"
            if pattern_splice.guards_of(found) != guards:
                return "the replacement branches on a symbolic size"
            old = [g.value(n) for n in found.outputs]
            new = [g.value(n) for n in pattern_splice.results(ready.gm)]
            why = pattern_splice.difference(old, new)
            if why is not None:
                return f"the replacement's {why}"
            say = context.rewrote if self.preserves else context.changed
            say(found.outputs[0], f"{self.name}: {len(found.calls)} nodes replaced")
            unnamed, gone = pattern_splice.splice(gm, found, ready.gm, ready.sources, nodes, facts)
        replaced = f" (in place of {', '.join(gone)})" if gone else ""
        for node in unnamed:
            why = f"a new linear of other weights{replaced}: no site, high precision"
            context.refused(node, why)
        return None


def _literals_of(gm: fx.GraphModule) -> set[Any]:
    """(type, value) of every number in the arguments of a graph's calls."""
    found: set[Any] = set()

    def look(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for one in value:
                look(one)
        elif isinstance(value, (int, float)):
            found.add((type(value), value))

    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method"):
            look(arguments(node))
    return found
