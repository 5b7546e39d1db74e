"""A pattern's graph -> where it occurs in a model's graph, by structure.

Calls are compared in one spelling (see `pattern_spelling`), and `+` and `*` match in either order.
Literals must be equal, sizes in the pattern among them, except free ones, which bind to any number
of their type; a dimension is the same from either end.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from torch import fx

from loka_compile.passes import matching as m
from loka_compile.passes.pattern_spelling import COMMUTES
from loka_compile.passes.pattern_spelling import arguments
from loka_compile.passes.pattern_spelling import dimensions
from loka_compile.passes.pattern_spelling import key_of

#: Node of the template -> node of the graph; name of a free literal -> its value there.
Binding = dict[Any, Any]


@dataclass(frozen=True, eq=False)
class Template:
    """A canonical graph that is looked for: its inputs bind to anything, its calls to equals."""

    gm: fx.GraphModule
    #: Argument name -> placeholder.
    inputs: Mapping[str, fx.Node]
    outputs: tuple[fx.Node, ...]
    #: A literal that binds to any number of its type -> the argument that it is.
    free: Mapping[Any, str] = field(default_factory=dict)

    calls: list[fx.Node] = field(init=False)
    #: Call -> what it computes, and its arguments: looked up at every node that is tried.
    keys: dict[fx.Node, Any] = field(init=False)
    values: dict[fx.Node, tuple[Any, ...]] = field(init=False)

    def __post_init__(self) -> None:
        calls = [n for n in self.gm.graph.nodes if n.op in ("call_function", "call_method")]
        object.__setattr__(self, "calls", calls)
        object.__setattr__(self, "keys", {n: key_of(n) for n in calls})
        object.__setattr__(self, "values", {n: arguments(n) for n in calls})

    @property
    def root(self) -> Any:
        """What the first output computes: a match can start nowhere else."""
        return self.keys[self.outputs[0]]


class Index:
    """What a call computes -> the graph's calls of it, without those that are replaced."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._calls: dict[Any, list[fx.Node]] = {}
        self._place: dict[fx.Node, int] = {}
        self.gone: set[fx.Node] = set()
        for place, node in enumerate(gm.graph.nodes):
            if node.op in ("call_function", "call_method"):
                self._place[node] = place
                self._calls.setdefault(key_of(node), []).append(node)

    def of(self, *keys: Any) -> list[fx.Node]:
        """Calls of any of `keys`, in graph order."""
        chosen = [self._calls.get(key, ()) for key in dict.fromkeys(keys)]
        found = [n for nodes in chosen for n in nodes if n not in self.gone]
        return sorted(found, key=self._place.__getitem__) if len(chosen) > 1 else found

    def whole(self, calls: Iterable[fx.Node]) -> bool:
        """All of `calls` are still as the graph was given, none made by a replacement."""
        return all(n in self._place and n not in self.gone for n in calls)


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
        elif isinstance(want, (list, tuple)):
            if isinstance(have, (list, tuple)) and len(have) == len(want):
                parts = tuple((a, b, where) for a, b in zip(want, have, strict=True))
                yield from self._solve((*parts, *rest), binding)
            else:
                self._missed(where, want, have, binding)
        elif (name := self._free(want)) is not None:
            if type(want) is type(have) and binding.get(name, have) == have:
                yield from self._solve(rest, {**binding, name: have})
            else:
                self._missed(where, binding.get(name, want), have, binding)
        elif type(want) is type(have) and (want == have or _both_nan(want, have)):
            yield from self._solve(rest, binding)
        else:
            self._missed(where, want, have, binding)

    def _free(self, want: Any) -> str | None:
        return self.template.free.get((type(want), want)) if self.template.free else None

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
        taken = any(v is have for k, v in binding.items() if _is_call(k))
        if taken or have.op not in ("call_function", "call_method"):
            return
        key = self.template.keys[want]
        if key != key_of(have):
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

    def _missed(self, where: fx.Node, want: Any, have: Any, binding: Binding) -> None:
        """Half of the calls agree and this literal does not: worth a word."""
        agreed = sum(map(_is_call, binding))
        if (
            self.near is None
            and not isinstance(have, fx.Node)
            and 2 * agreed >= len(self.template.calls)
        ):
            self.near = (
                where,
                f"{m.name_of(where)} has {have!r} where the pattern has {want!r}",
            )


def _both_nan(want: Any, have: Any) -> bool:
    return isinstance(want, float) and want != want and have != have


def _is_call(key: Any) -> bool:
    return isinstance(key, fx.Node) and key.op != "placeholder"
