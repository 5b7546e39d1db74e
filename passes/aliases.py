"""Facts of one graph that no single node shows: order, aliases, in-place writes, mode switches."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from loka_compile.passes import graph as g
from loka_compile.passes.matching import CASTS
from loka_compile.passes.matching import name_of

GRAD_MODES = ("_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode")
AUTOCAST = ("_enter_autocast", "_exit_autocast")
_SWITCHES = frozenset((*GRAD_MODES, *AUTOCAST))
_VIEWS = {
    "view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "t", "transpose", "permute",
    "squeeze", "unsqueeze", "expand", "expand_as", "narrow", "select", "chunk", "split", "unbind",
    "diagonal", "swapaxes", "movedim", "detach", "contiguous", "getattr", "getitem", "as_strided",
    *CASTS,
}  # fmt: skip


class Facts:
    """Order, aliases, writes and mode switches of one graph, as it stood when this was made.

    Two nodes alias when their fake values share storage, or when one is a view or an in-place
    result of the other by name: after a no-op dropout is gone the fakes alone would not tell.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._parent: dict[Any, Any] = {}
        #: root -> all keys of its group, nodes among them: asked for one node at a time, a walk
        #: over the whole graph would make a pass quadratic.
        self._members: dict[Any, list[Any]] = {}
        self.order: dict[fx.Node, float] = {node: i for i, node in enumerate(gm.graph.nodes)}
        self._bodies = dict(g.bodies(gm))
        self._writes: list[tuple[fx.Node, list[fx.Node]]] = []
        self._switches: list[fx.Node] = []
        for node in self.order:
            self._learn(node)

    def _learn(self, node: fx.Node) -> None:
        for key in storages(g.value(node)):
            self._union(node, key)
        if node.op not in ("call_method", "call_function"):
            return
        name = name_of(node)
        written = list(_written(node, self._bodies.get(node)))
        if written:
            self._writes.append((node, written))
        for source in [*written, *(node.args[:1] if name in _VIEWS else ())]:
            if isinstance(source, fx.Node):
                self._union(node, source)
        if name in _SWITCHES and node.op == "call_function":
            self._switches.append(node)

    def replaced(self, gone: Iterable[fx.Node], added: Sequence[fx.Node]) -> None:
        """`added`, neighbours in graph order, stand where the erased nodes `gone` stood or near."""
        for node in gone:
            self.order.pop(node, None)
        if added:
            low = self.order.get(added[0].prev, -1.0)
            high = self.order.get(added[-1].next, len(self.order) + low + 1)
            step = (high - low) / (len(added) + 1)
            self.order.update({n: low + step * i for i, n in enumerate(added, start=1)})
            for node in added:
                self._learn(node)

    def inserted(self, behind: fx.Node, before: fx.Node) -> None:
        """Learn what was put in between two nodes that were neighbours."""
        added, node = [], behind.next
        while node is not before:
            added.append(node)
            node = node.next
        self.replaced((), added)

    def modes(self, at: fx.Node) -> tuple[tuple[Any, ...], ...]:
        """(device, dtype, enabled, ...) of the graph's autocast regions around `at`, in order."""
        opened: dict[fx.Node, tuple[Any, ...]] = {}
        for one in self._switches:
            if self.order[one] < self.order[at]:
                if name_of(one) == "_enter_autocast":
                    opened[one] = one.args
                elif name_of(one) == "_exit_autocast":
                    opened.pop(one.args[0], None)  # type: ignore[arg-type]
        return tuple(opened.values())

    def alone(self, node: fx.Node) -> bool:
        """A fresh value: it shares memory with no input and with no node but in-place results."""
        if node.op not in ("call_function", "call_method") or name_of(node) in _VIEWS:
            return False
        group = self._members.get(self._find(node), ())
        return all(n is node or n in node.users for n in group if n in self.order)

    def written(self, node: fx.Node, after: fx.Node | None = None) -> fx.Node | None:
        """Some node that writes to memory of `node`, anywhere in the graph or behind `after`."""
        group = self._find(node)
        for writer, targets in self._writes:
            if after is not None and self.order[writer] < self.order[after]:
                continue
            if any(self._find(t) is group for t in targets):
                return writer
        return None

    def obstacle(
        self,
        first: fx.Node,
        last: fx.Node,
        reads: Iterable[Any],
        *,
        inside: Iterable[fx.Node] = (),
        autocast: bool = True,
    ) -> str | None:
        """Why `reads` may not be read at `last` instead of from `first` on; None when they may.

        Set `autocast` to False where a rewrite spells out its dtypes.
        """
        start, end = self.order[first], self.order[last]
        own = set(inside) | {first, last}
        groups = {self._find(n) for n in (*own, *reads) if isinstance(n, fx.Node)}
        for node in self._switches:
            if start < self.order[node] < end and (autocast or name_of(node) in GRAD_MODES):
                return f"{name_of(node)} in between"
        for node, written in self._writes:
            if start < self.order[node] < end and node not in own:
                for target in written:
                    if self._find(target) in groups:
                        return f"{target.name} is written to in place in between ({name_of(node)})"
        return None

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """`new` takes the place of `old`, which is erased; later questions know it."""
        self.order[new] = self.order.pop(old)
        self._writes = [w for w in self._writes if w[0] is not old]
        self._union(new, old)
        old.replace_all_uses_with(new)
        old.graph.erase_node(old)

    def _find(self, key: Any) -> Any:
        root, parent = key, self._parent
        while (above := parent.get(root, root)) is not root:
            root = above
        while (above := parent.get(key, key)) is not root:
            parent[key], key = root, above
        return root

    def _union(self, a: Any, b: Any) -> None:
        for key in (a, b):
            if key not in self._parent:
                self._parent[key], self._members[key] = key, [key]
        small, large = self._find(a), self._find(b)
        if small is not large:
            if len(self._members[small]) > len(self._members[large]):
                small, large = large, small
            self._parent[small] = large
            self._members[large] += self._members.pop(small)


def storages(v: Any) -> Iterator[tuple[str, int]]:
    """Keys of the memory under a fake value."""
    if isinstance(v, torch.Tensor):
        try:
            key = v.untyped_storage()._cdata
        except NotImplementedError:
            return  # sparse and functorch-wrapped tensors have no storage to ask for
        yield "storage", key
    elif isinstance(v, (list, tuple)):
        for one in v:
            yield from storages(one)


def _written(node: fx.Node, body: fx.GraphModule | None) -> Iterator[fx.Node]:
    """The nodes that `node` writes to."""
    if g.is_mutation(node):
        for target in (node.args[:1] or ()) if node.kwargs.get("out") is None else ():
            yield from _nodes(target)
        yield from _nodes(node.kwargs.get("out"))
    elif body is not None:
        # A body that writes at all is taken to write to everything that it is given.
        if any(g.is_mutation(inner) for one in g.every_graph(body) for inner in one.graph.nodes):
            yield from node.all_input_nodes
    elif isinstance(node.target, torch._ops.OpOverload):
        for at in _written_positions(node.target):
            if at < len(node.args):
                yield from _nodes(node.args[at])


@functools.lru_cache(maxsize=1024)
def _written_positions(op: torch._ops.OpOverload) -> tuple[int, ...]:
    aliases = (argument.alias_info for argument in op._schema.arguments)
    return tuple(i for i, a in enumerate(aliases) if a is not None and a.is_write)


def _nodes(argument: Any) -> Iterator[fx.Node]:
    if isinstance(argument, fx.Node):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for one in argument:
            yield from _nodes(one)
