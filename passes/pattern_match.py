"""A pattern's graph -> where it occurs in a model's graph, by structure.

Calls are compared in one spelling (see `pattern_spelling`), and `+` and `*` match in either order.
Literals must be equal, sizes in the pattern among them, except free ones, which bind to any number
or tuple of ints; a dimension is the same from either end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from loka_compile import _compat
from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes.aliases import AUTOCAST
from loka_compile.passes.aliases import GRAD_MODES
from loka_compile.passes.pattern_spelling import COMMUTES
from loka_compile.passes.pattern_spelling import arguments
from loka_compile.passes.pattern_spelling import counts_dimensions
from loka_compile.passes.pattern_spelling import dimensions
from loka_compile.passes.pattern_spelling import key_of

SWITCHES = (*GRAD_MODES, *AUTOCAST)
#: Node of the template -> node of the graph; name of a free literal -> its value there.
Binding = dict[Any, Any]


@dataclass(frozen=True, eq=False)
class Template:
    """A canonical graph that is looked for: its inputs bind to anything, its calls to equals."""

    gm: fx.GraphModule
    #: Argument name -> placeholder.
    inputs: Mapping[str, fx.Node]
    outputs: tuple[fx.Node, ...]
    #: `literal_key` of a literal that binds to any of its type -> the argument that it is.
    free: Mapping[Any, str] = field(default_factory=dict)
    #: Inputs that also bind to None.
    optional: frozenset[fx.Node] = frozenset()

    calls: list[fx.Node] = field(init=False)
    #: Call -> what it computes, and its arguments: looked up at every node that is tried.
    keys: dict[fx.Node, Any] = field(init=False)
    values: dict[fx.Node, tuple[Any, ...]] = field(init=False)
    #: What the first output computes: a match can start nowhere else.
    root: Any = field(init=False)
    #: One call whose arguments stand for themselves.
    is_flat: bool = field(init=False)

    def __post_init__(self) -> None:
        calls = [n for n in self.gm.graph.nodes if n.op in ("call_function", "call_method")]
        keys = {n: key_of(n) for n in calls}
        object.__setattr__(self, "calls", calls)
        object.__setattr__(self, "keys", keys)
        object.__setattr__(self, "values", {n: arguments(n) for n in calls})
        object.__setattr__(self, "root", keys[self.outputs[0]])
        object.__setattr__(self, "is_flat", len(calls) == 1 and _is_flat(calls[0], self.free))


def _is_flat(call: fx.Node, free: Mapping[Any, str]) -> bool:
    # In a sequence each element may be free; dimensions count from either end, sums from both.
    nested = any(
        isinstance(v, (list, tuple)) and literal_key(v) not in free for v in arguments(call)
    )
    return not (nested or key_of(call) in COMMUTES or counts_dimensions(call))


def literal_key(value: Any) -> Any:
    """Type and value of a number or a sequence of ints; None for what cannot be free."""
    if isinstance(value, (list, tuple)):
        return (tuple, tuple(value)) if all(type(v) is int for v in value) else None
    return (type(value), value) if isinstance(value, (int, float)) else None


class Index:
    """What a call computes -> the graph's calls of it, without those that are replaced."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._calls: dict[Any, list[fx.Node]] = {}
        #: Call -> its place in the graph and what it computes.
        self._known: dict[fx.Node, tuple[int, Any]] = {}
        self.gone: set[fx.Node] = set()
        for place, node in enumerate(gm.graph.nodes):
            if node.op in ("call_function", "call_method"):
                key = key_of(node)
                self._known[node] = place, key
                self._calls.setdefault(key, []).append(node)
        names = {str(getattr(key, "__name__", key)) for key in self._calls}
        #: Autocast or grad mode changes on the way.
        self.switches = not names.isdisjoint(SWITCHES)
        #: It runs a functorch transform (vmap, grad), as `matching.transformed` has it.
        self.transformed = any("_increment_nesting" in name for name in names)

        fakes = (g.value(n) for n in gm.graph.nodes)
        mode = next((v.fake_mode for v in fakes if isinstance(v, FakeTensor)), None)
        #: Guards on the graph's symbolic sizes so far: one more would be checked by nobody.
        self.count_guards: Callable[[], int] = functools.partial(_compat.count_guards, mode)
        if getattr(mode, "shape_env", None) is None:
            self.count_guards = int

    def key(self, call: fx.Node) -> Any:
        return self._known[call][1]

    def of(self, *keys: Any) -> list[fx.Node]:
        """Calls of any of `keys`, in graph order."""
        chosen = [self._calls.get(key, ()) for key in dict.fromkeys(keys)]
        found = [n for nodes in chosen for n in nodes if n not in self.gone]
        return sorted(found, key=lambda n: self._known[n][0]) if len(chosen) > 1 else found

    def whole(self, calls: Iterable[fx.Node]) -> bool:
        """All of `calls` are still as the graph was given, none made by a replacement."""
        return all(n in self._known and n not in self.gone for n in calls)


@dataclass
class Search:
    """All occurrences of one template in one graph, from one root at a time."""

    template: Template
    index: Index
    #: (node, reason) where the last root failed on a literal only.
    near: tuple[fx.Node, str] | None = None

    def at(self, root: fx.Node) -> Iterator[Binding]:
        """Bindings whose first output is `root`."""
        self.near = None
        if self.template.is_flat:
            found = self._flat(root)
            if found is not None:
                yield found
                return
        yield from self._outputs(0, {}, root)

    def _flat(self, root: fx.Node) -> Binding | None:
        """The binding of a template of one call, the common case, without a search."""
        template = self.template
        (want,) = template.calls
        theirs, binding = arguments(root), Binding({want: root})
        if len(theirs) != len(template.values[want]):
            return None
        for ours, have in zip(template.values[want], theirs, strict=True):
            if isinstance(ours, fx.Node):
                missing = have is None and ours in template.optional
                if ours in binding or not (missing or m.tensor(have) is not None):
                    return None
                binding[ours] = have
            elif (name := self._free(ours)) is not None:
                literal = _bound_literal(ours, have)
                if literal is None or binding.get(name, literal) != literal:
                    return None
                binding[name] = literal
            elif type(ours) is not type(have) or ours != have:
                return None
        return binding

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
            candidates = self.index.of(self.template.keys[wanted])
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
        elif (name := self._free(want)) is not None:
            literal = _bound_literal(want, have)
            if literal is not None and binding.get(name, literal) == literal:
                yield from self._solve(rest, {**binding, name: literal})
            else:
                self._missed(where, binding.get(name, want), have, binding, name)
        elif isinstance(want, (list, tuple)):
            if isinstance(have, (list, tuple)) and len(have) == len(want):
                parts = tuple((a, b, where) for a, b in zip(want, have, strict=True))
                yield from self._solve((*parts, *rest), binding)
            else:
                self._missed(where, want, have, binding)
        elif type(want) is type(have) and (want == have or _both_nan(want, have)):
            yield from self._solve(rest, binding)
        else:
            self._missed(where, want, have, binding)

    def _free(self, want: Any) -> str | None:
        return self.template.free.get(literal_key(want)) if self.template.free else None

    def _node(
        self, want: fx.Node, have: Any, rest: tuple[Any, ...], binding: Binding
    ) -> Iterator[Binding]:
        if not isinstance(have, fx.Node):
            if have is None and want in self.template.optional and binding.get(want) is None:
                yield from self._solve(rest, {**binding, want: None})
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
        if have.op not in ("call_function", "call_method"):
            return
        key = self.template.keys[want]
        if key != key_of(have):
            return
        if any(v is have for k, v in binding.items() if _is_call(k)):
            return
        # Dimensions of both by the rank at the match: -1 of the pattern is the last one there too.
        ours, theirs = dimensions(want, self.template.values[want], have), arguments(have)
        theirs = dimensions(have, theirs, have)
        if len(ours) != len(theirs):
            return
        orders = [theirs]
        if key in COMMUTES and len(theirs) > 1:
            orders.append((theirs[1], theirs[0], *theirs[2:]))
        for order in orders:
            parts = tuple((a, b, have) for a, b in zip(ours, order, strict=True))
            yield from self._solve((*parts, *rest), bound)

    def _missed(
        self, where: fx.Node, want: Any, have: Any, binding: Binding, free: str | None = None
    ) -> None:
        """Half of the calls agree and this literal does not: worth a word."""
        if self.near is not None or 2 * sum(map(_is_call, binding)) < len(self.template.calls):
            return
        name = m.name_of(where)
        if free is not None and _computed(have):
            why = "is a graph input, not a literal (dynamic=True makes it one)"
            self.near = where, f"{name} left as written: {free} {why}"
        elif not isinstance(have, fx.Node):
            self.near = where, f"{name} has {have!r} where the pattern has {want!r}"


def _bound_literal(want: Any, have: Any) -> Any:
    """What a free literal is here; None where it is nothing that it may be."""
    key = literal_key(have)
    if isinstance(want, (list, tuple)):
        return key[1] if key is not None and key[0] is tuple else None
    if type(want) is float and type(have) is int:
        return float(have)
    return have if type(have) is type(want) and key is not None else None


def _computed(value: Any) -> bool:
    several = isinstance(value, (list, tuple))
    return any(map(_computed, value)) if several else isinstance(value, fx.Node)


def _both_nan(want: Any, have: Any) -> bool:
    return isinstance(want, float) and want != want and have != have


def _is_call(key: Any) -> bool:
    return isinstance(key, fx.Node) and key.op != "placeholder"
