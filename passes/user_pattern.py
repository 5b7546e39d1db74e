"""Graph with matches of patterns -> graph with their replacements in their place."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from torch import fx

from loka_compile.errors import PatternError
from loka_compile.options import Options
from loka_compile.passes import graph as g
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
from loka_compile.passes.pattern_reuse import modes_in_force
from loka_compile.passes.pattern_site import Match
from loka_compile.passes.pattern_splice import Found
from loka_compile.passes.pattern_templates import look_for
from loka_compile.passes.pattern_trace import NotTraceableError
from loka_compile.passes.pattern_trace import constants_of
from loka_compile.passes.pattern_trace import no_autocast
from loka_compile.passes.pattern_trace import stand_ins_of


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
    preserves: bool | Callable[[Match], bool] = False
    #: Names of arguments that bind to any number, or tuple of ints.
    free: tuple[str, ...] = ()
    #: Names of tensor arguments that may be None in the model.
    optional: tuple[str, ...] = ()
    #: What the report calls one use.
    says: str | Callable[[Match], str] | None = None
    #: Gives the text of the functions, for the cache key.
    source: Callable[[], str] = str
    templates: list[Template] = field(init=False)
    traces: Traces = field(init=False)
    #: Names of what `when` gives.
    constants: tuple[str, ...] = field(init=False)
    _names: tuple[str, ...] = field(init=False)
    _text: str = field(init=False)

    def __post_init__(self) -> None:
        self.traces, self.constants = Traces(self.replacement), constants_of(self.replacement)
        with no_autocast():
            found = look_for(self.name, self.pattern, self.example, self.free, self.optional)
            self._names, self.templates, self._text = found.names, found.templates, found.text
            self._try_replacement()

    def _try_replacement(self) -> None:
        values = [*stand_ins_of(self.example), *self._example_constants()]
        try:
            gm, _ = self.traces.get(values).copy(values)
        except NotTraceableError as error:
            raise PatternError(self.name, f"the replacement {error}") from error
        old = [g.value(n) for n in self.templates[0].outputs]
        why = pattern_splice.difference(old, [g.value(n) for n in pattern_splice.results(gm)])
        if why is not None:
            raise PatternError(self.name, f"on its example, the replacement's {why}")
        self._text += text_of(gm)

    def _example_constants(self) -> list[Any]:
        """What `when` gives for the pattern's own example, where the replacement asks for it."""
        if not self.constants:
            return []
        template = self.templates[0]
        own = {n: n for n in (*template.calls, *template.inputs.values())}
        literals = {name: self.example[self._names.index(name)] for name in self.free}
        site = Site(self, self.found(template, {**own, **literals}))
        why = site.why_not(PassContext(Options()), lambda: Facts(template.gm))
        if why is not None:
            raise PatternError(self.name, f"its `when` refuses its own example: {why or 'no'}")
        return list(site.constants)

    def found(self, template: Template, binding: Binding) -> Found:
        inputs = {name: binding[node] for name, node in template.inputs.items()}
        absent = frozenset(n for n in self.optional if inputs[n] is None)
        calls = [binding[n] for n in template.calls]
        return Found(
            {n: v for n, v in inputs.items() if v is not None} if absent else inputs,
            calls,
            [binding[n] for n in template.outputs],
            {name: binding[name] for name in template.free.values()},
            absent,
            template.is_flat and pattern_splice.is_plain(calls[0]),
        )

    def arguments(self, found: Found) -> list[Any]:
        """Nodes, and literals, in the order of the pattern's arguments."""
        return [
            found.argument(name, value)
            for name, value in zip(self._names, self.example, strict=True)
        ]

    def digest(self) -> str:
        """Differs whenever what this pass does may differ."""
        parts = (self.name, self.source(), self._text, self.before, self.after)
        says = (bool(self.preserves), self.free, self.optional)
        return hashlib.sha256(repr((*parts, says)).encode()).hexdigest()

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        apply([self], gm, context)


_AS_THEY_ARE = contextlib.nullcontext()


def _modes(found: Found, facts: Callable[[], Facts]) -> contextlib.AbstractContextManager[None]:
    """The autocast regions of the graph in which a match stands."""
    return pattern_splice.modes_at(found.last(facts()), facts())


@dataclass
class Site:
    """One place where a pattern may be replaced."""

    pattern: UserPattern
    found: Found
    #: What `when` gave, in the order of the replacement's keyword-only arguments.
    constants: tuple[Any, ...] = ()
    match: Match | None = None

    def why_not(
        self,
        context: PassContext,
        facts: Callable[[], Facts],
        count_guards: Callable[[], int] = int,
    ) -> str | None:
        """None where it may be; "" where that is not worth a word."""
        if not self.found.plain:
            why = pattern_splice.why_not(self.found, facts())
            if why is not None:
                return why
        self.match = Match(self.found, context, facts)
        wanted = self.pattern.constants
        if self.pattern.when is None:
            return f"needs a `when` that gives {', '.join(wanted)}" if wanted else None
        guards = count_guards()
        answer = self.pattern.when(self.match)
        if isinstance(answer, str):
            return answer
        given: Mapping[str, Any] = answer if isinstance(answer, Mapping) else {}
        if not answer and answer != {}:
            return "its `when` said no"
        if set(given) != set(wanted):
            return f"its `when` gives {sorted(given)}, the replacement takes {sorted(wanted)}"
        if count_guards() != guards:
            return "its `when` branches on a symbolic size"
        self.match.constants = given
        self.constants = tuple(given[name] for name in wanted)
        return None

    def apply(
        self,
        gm: fx.GraphModule,
        context: PassContext,
        reuse: Reuse,
        facts: Callable[[], Facts],
        count_guards: Callable[[], int],
    ) -> str | None:
        """Put the replacement in; else say why not."""
        found = self.found
        nodes = [*self.pattern.arguments(found), *self.constants]
        values = [g.value(n) if isinstance(n, fx.Node) else n for n in nodes]
        guards = count_guards()
        try:
            if reuse.becomes(found, nodes, values):
                self._say(context)
                return None
            ready = reuse.get(values, found, facts)
        except NotTraceableError as error:
            return f"the replacement {error}"
        if count_guards() != guards:
            return "the replacement branches on a symbolic size"
        old = [g.value(n) for n in found.outputs]
        why = pattern_splice.difference(old, [g.value(n) for n in ready.results])
        if why is not None:
            return f"the replacement's {why}"
        self._say(context)
        unnamed, gone = pattern_splice.splice(gm, found, ready.gm, ready.sources, nodes, facts())
        replaced = f" (in place of {', '.join(gone)})" if gone else ""
        for node in unnamed:
            why = f"a new linear of other weights{replaced}: no site, high precision"
            context.refused(node, why)
        return None

    def _say(self, context: PassContext) -> None:
        one, match = self.pattern, self.match
        assert match is not None  # `why_not` came first
        exact = one.preserves(match) if callable(one.preserves) else one.preserves
        says = one.says(match) if callable(one.says) else one.says
        say = context.rewrote if exact else context.changed
        # Under a linear's name, where there is one: who asks about the linear hears of it.
        like = next((n for n in self.found.calls if g.SITE in n.meta), match.result)
        say(like, says or f"{one.name}: {len(self.found.calls)} nodes replaced")


def apply(patterns: Sequence[UserPattern], gm: fx.GraphModule, context: PassContext) -> None:
    """All of them in one walk over the graph. Where several match, the first one counts."""
    index = Index(gm)
    if index.transformed:
        first = next(iter(gm.graph.nodes))
        return context.refused(first, "inside a functorch transform (vmap, grad): left alone")
    modes = None if index.switches else modes_in_force()
    searches: dict[Any, list[tuple[UserPattern, Search, Reuse]]] = {}
    for one in patterns:
        reuse = Reuse(one.traces, modes)
        for template in one.templates:
            searches.setdefault(template.root, []).append((one, Search(template, index), reuse))
    # Gathered where something asks: most patterns match nothing in most graphs.
    facts = functools.cache(lambda: Facts(gm))
    for root in index.of(*searches):
        if root not in index.gone:
            refusal = _at(root, searches[index.key(root)], index, gm, context, facts)
            if refusal is not None and refusal[1]:
                context.refused(*refusal)


def _at(
    root: fx.Node,
    searches: Sequence[tuple[UserPattern, Search, Reuse]],
    index: Index,
    gm: fx.GraphModule,
    context: PassContext,
    facts: Callable[[], Facts],
) -> tuple[fx.Node, str] | None:
    """Replace what has its first result at `root`; else the first reason why not, if any."""
    refusal: tuple[fx.Node, str] | None = None
    for one, search, reuse in searches:
        for binding in search.at(root):
            site = Site(one, one.found(search.template, binding))
            if not (search.template.is_flat or index.whole(site.found.calls)):
                continue
            with _modes(site.found, facts) if index.switches else _AS_THEY_ARE:
                why = site.why_not(context, facts, index.count_guards)
                if why is None:
                    why = site.apply(gm, context, reuse, facts, index.count_guards)
            if why is None:
                index.gone.update(site.found.calls)
                return None
            refusal = refusal or (root, why)
        refusal = refusal or search.near
    return refusal
