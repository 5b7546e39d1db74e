"""One match and its replacement's graph -> the graph with the one in place of the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from loka_compile.lowering.epilogue_ops import LINEAR_EPILOGUE
from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes.aliases import AUTOCAST
from loka_compile.passes.aliases import GRAD_MODES
from loka_compile.passes.aliases import Facts
from loka_compile.passes.aliases import storages
from loka_compile.passes.pattern_spelling import key_of

#: Where each GEMM op has its weight.
_WEIGHT_AT = {
    m.LINEAR: 1,
    torch.ops.loka.linear.default: 1,
    LINEAR_EPILOGUE: 1,
    torch.ops.loka.linear_block_norm_act.default: 3,
}
#: They read, so strides and shared memory make no difference to them, and give fresh results.
_PLAIN = {
    *("add", "sub", "mul", "div", "neg", "matmul", "relu", "sigmoid", "tanh", "cat", "exp", "sum"),
    *("mean", "pow", "softmax", F.silu, F.gelu, torch._C._nn.gelu, F.hardswish, F.hardsigmoid),
    *(F.layer_norm, F.group_norm, "rms_norm", m.LINEAR),
}


@dataclass(frozen=True, eq=False)
class Found:
    #: Argument name -> node; optional ones that are None here are in `absent`.
    inputs: dict[str, fx.Node]
    calls: list[fx.Node]
    outputs: list[fx.Node]
    #: Free literals by argument name.
    literals: dict[str, Any] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    #: One call, of an op that reads and gives a fresh result: nothing can stand in its way.
    plain: bool = False

    def argument(self, name: str, example: Any) -> Any:
        """The node or the literal that stands for an argument; `example` for a constant."""
        if name in self.absent:
            return None
        node = self.inputs.get(name)
        return self.literals.get(name, example) if node is None else node

    def first(self, facts: Facts) -> fx.Node:
        return min(self.calls, key=facts.order.__getitem__)

    def last(self, facts: Facts) -> fx.Node:
        return max(self.calls, key=facts.order.__getitem__)


def why_not(found: Found, facts: Facts) -> str | None:
    """Why these nodes may not be replaced, whatever by; None when they may."""
    inside, outputs = set(found.calls), set(found.outputs)
    if len(outputs) != len(found.outputs) or inside & set(found.inputs.values()):
        return "one value is needed in two roles"
    for node in found.calls:
        if g.is_mutation(node):
            return f"{_at(node)} writes in place"
        for user in node.users:
            if node not in outputs and user not in inside:
                return f"{_at(node)} is also read by {_at(user)}"
    for node in (*inside, *found.inputs.values()):
        if node not in facts.order:
            return "part of it was replaced already"
    last_input = max((facts.order[n] for n in found.inputs.values()), default=-1)
    for node in outputs:
        early = [u for u in node.users if u not in inside and facts.order[u] <= last_input]
        if early:
            return f"{_at(early[0])} reads one result before all inputs exist"
    for node in outputs:
        if facts.alone(node) or _is_fresh_cast(node):
            continue
        writer = facts.written(node)
        if writer is not None:
            return f"its result shares memory that {_at(writer)} writes to"
        if any(u.op == "output" for u in node.users):
            return f"{_at(node)} leaves the graph and shares memory with other values"
    return facts.obstacle(
        found.first(facts), found.last(facts), found.inputs.values(), inside=found.calls
    )


def is_plain(node: fx.Node) -> bool:
    """A call that reads its arguments and gives a fresh result."""
    if key_of(node) not in _PLAIN:
        return False
    # Without either it cannot be told to write; to ask in full takes longer.
    told = node.kwargs or any(a is True for a in node.args)
    return not (told and g.is_mutation(node))


def is_switch(node: fx.Node) -> bool:
    """A call that switches a mode: it computes nothing, and what it does cannot be matched."""
    return node.op == "call_function" and m.name_of(node) in (*GRAD_MODES, *AUTOCAST)


def _is_fresh_cast(node: fx.Node) -> bool:
    return m.is_cast(node) and g.value(node).dtype != g.value(node.args[0]).dtype


def _at(node: fx.Node) -> str:
    if node.op == "output":
        return "the graph's output"
    line = g.line_of(node)
    return f"{m.name_of(node)} ({line})" if line else m.name_of(node)


# -- values ---------------------------------------------------------------------------------------


def results(gm: fx.GraphModule) -> list[Any]:
    """What a graph returns, always as a list."""
    output = next(n for n in gm.graph.nodes if n.op == "output")
    value = output.args[0]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def difference(old: Sequence[Any], new: Sequence[Any]) -> str | None:
    """What differs in form between the pattern's and the replacement's results."""
    if len(old) != len(new):
        return f"number of results is {len(new)}, the pattern's {len(old)}"
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
        which = f"result {i}" if len(old) > 1 else "result"
        if not isinstance(b, torch.Tensor):
            return f"{which} is no tensor"
        if not _same_sizes(a.shape, b.shape):
            return f"{which} has shape {tuple(b.shape)}, the pattern's {tuple(a.shape)}"
        for what in ("dtype", "device"):
            if getattr(a, what) != getattr(b, what):
                return f"{which} has {what} {getattr(b, what)}, the pattern's {getattr(a, what)}"
    return None


def _same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(
        statically_known_true(x == y) for x, y in zip(a, b, strict=True)
    )


@contextlib.contextmanager
def modes_at(node: fx.Node, facts: Facts) -> Iterator[None]:
    """The autocast regions of the graph in which `node` stands."""
    with contextlib.ExitStack() as stack:
        for device, dtype, enabled, *_ in facts.modes(node):
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        yield


# -- one call for one call ------------------------------------------------------------------------


def only_call(new: fx.GraphModule, sources: Mapping[fx.Node, Any]) -> fx.Node | None:
    """The one plain call that a replacement consists of; None where it has more, or reads sizes."""
    calls = [n for n in new.graph.nodes if n.op not in ("placeholder", "output")]
    plain = len(calls) == 1 and results(new) == calls and calls[0].op == "call_function"
    if not plain or any(dim is not None for _, dim in sources.values()):
        return None
    return calls[0] if is_plain(calls[0]) else None


def retarget(old: fx.Node, new: fx.Node, arguments: Mapping[fx.Node, Any]) -> None:
    """One plain call becomes another whose result has the same form.

    It keeps its name, its place and its site; readers and memory are as they were.
    """
    if old.target is not new.target:
        old.target = new.target
    old.args, old.kwargs = fx.map_arg((new.args, new.kwargs), arguments.__getitem__)  # type: ignore[misc]
    old.meta.setdefault("loka_from", []).append(old.name)


# -- the splice -----------------------------------------------------------------------------------


def splice(
    gm: fx.GraphModule,
    found: Found,
    new: fx.GraphModule,
    sources: Mapping[fx.Node, tuple[int, int | None]],
    arguments: Sequence[Any],
    facts: Facts,
) -> tuple[list[fx.Node], list[str]]:
    """Put `new` in; returns its GEMMs that took over no site name, and the names that are gone."""
    like, graph = found.outputs[0], gm.graph
    names = {
        n.args[_WEIGHT_AT[n.target]]: n.meta[g.SITE]
        for n in found.calls
        if n.op == "call_function" and n.target in _WEIGHT_AT and g.SITE in n.meta
    }
    copies: dict[fx.Node, Any] = {}
    added: list[fx.Node] = []
    with graph.inserting_before(_spot(found, facts)):
        for node in new.graph.nodes:
            if node.op == "placeholder":
                position, dim = sources[node]
                copies[node] = arguments[position]
                if dim is not None and node.users:
                    size = graph.call_method("size", (arguments[position], dim))
                    copies[node] = size
                    added.append(_inherit(size, like, g.value(node)))
            elif node.op != "output":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                added.append(_inherit(copies[node], like, g.value(node)))
        for old, node in zip(found.outputs, results(new), strict=True):
            result = copies[node]
            if not _may_stand_in(old, node, found, results(new), facts):
                value = g.value(result).clone(memory_format=torch.contiguous_format)
                layout: dict[str, Any] = {"memory_format": torch.contiguous_format}
                result = graph.call_method("clone", (result,), layout)
                added.append(_inherit(result, like, value))
            old.replace_all_uses_with(result)
    for node in sorted(found.calls, key=facts.order.__getitem__, reverse=True):
        graph.erase_node(node)
    facts.replaced(found.calls, added)
    unnamed = []
    for node in added:
        if node.op == "call_function" and node.target in _WEIGHT_AT:
            name = names.pop(node.args[_WEIGHT_AT[node.target]], None)
            if name is None:
                unnamed.append(node)
            else:
                node.meta[g.SITE] = name
    return unnamed, sorted(map(str, names.values()))


def _spot(found: Found, facts: Facts) -> fx.Node:
    """Before this node all inputs exist and nobody has read a result."""
    last = max(found.inputs.values(), key=facts.order.__getitem__)
    first = found.first(facts)
    spot = last.next if facts.order[last] > facts.order[first] else first
    while spot.op == "placeholder":
        spot = spot.next
    return spot


def _inherit(new: fx.Node, old: fx.Node, value: Any) -> fx.Node:
    new.meta = {}
    g.inherit(new, old, value)
    # The site is the GEMM's, and goes by its weight.
    new.meta.pop(g.SITE, None)
    if value is None:
        new.meta.pop("example_value")
    return new


def _may_stand_in(
    old: fx.Node, new: fx.Node, found: Found, others: Sequence[fx.Node], facts: Facts
) -> bool:
    """Nobody can tell the new result's strides or memory from the old one's."""
    own = set(storages(g.value(new)))
    inputs = [n for n in new.graph.nodes if n.op == "placeholder"]
    of_inputs = any(not own.isdisjoint(storages(g.value(n))) for n in inputs)
    if of_inputs and any(facts.written(n) for n in found.inputs.values()):
        return False
    plain = all(u in found.calls or key_of(u) in _PLAIN for u in old.users)
    if plain and not any(map(g.is_mutation, old.users)):
        return m.row_major(g.value(old)) and m.row_major(g.value(new))
    if not _same_sizes(g.value(old).stride(), g.value(new).stride()):
        return False
    if not facts.alone(old) and not _is_fresh_cast(old):
        return True  # it shared memory before; `why_not` made sure that nobody minds
    results_too = [n for n in others if n is not new]
    return not of_inputs and all(own.isdisjoint(storages(g.value(n))) for n in results_too)
