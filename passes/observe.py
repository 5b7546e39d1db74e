"""Graph -> graph with observers: each probed site records its input and its output gradient.

The state (`probe/statistics.py`) stays out of the graph: three small tensors (`probe/places.py`)
enter as extra placeholders behind Dynamo's own and are bound at call time by the weights' identity,
so that equal blocks that share one graph keep apart. Observers of inputs are nodes; gradients are
observed inside the registered backward, which gets what it needs through the op's `probe` argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import AttrSource
from torch._dynamo.source import LocalSource
from torch._guards import detect_fake_mode

from loka_compile.passes import graph as g
from loka_compile.passes.handover import OBSERVE
from loka_compile.passes.handover import PROBE_AT
from loka_compile.passes.manager import PassContext
from loka_compile.probe import places


@dataclass(frozen=True)
class StateKey:
    """One state group: which site, input ("x") or output gradient ("g")."""

    site: str
    role: str
    #: Is a covariance asked for.
    covariance: bool = False


class Observe:
    """Runs after `dispatch`, on `loka::` ops. `keys` lists the state groups, in binding order."""

    name = "observe"

    def __init__(
        self,
        sites: frozenset[str],
        covariances: frozenset[str] = frozenset(),
        in_turn: bool = False,
    ) -> None:
        """in_turn: of the sites a step asks few (`probe/turns.py`)."""
        self.sites = sites
        self.covariances = covariances
        self.in_turn = in_turn
        self.keys: list[StateKey] = []
        self._visited: set[fx.GraphModule] = set()

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        # The manager visits bodies too; they are handled from the top, where placeholders live.
        if self._visited:
            return
        found = [n for one in g.every_graph(gm) for n in one.graph.nodes if self._is_site(n)]
        if not found:
            return
        like = g.value(found[0].args[0])
        tensors = [
            static_placeholder(gm, f"loka_places_{i}", torch.empty(shape, dtype=torch.int64), like)
            for i, shape in enumerate(places.shapes_of(2 * len(found)))
        ]
        self._graph(gm, context, tensors, g.value(tensors[places.CELLS]).select(0, 0))

    def _is_site(self, node: fx.Node) -> bool:
        return (
            node.op == "call_function"
            and node.target in PROBE_AT
            and node.meta.get(g.SITE) in self.sites
        )

    def _graph(
        self, gm: fx.GraphModule, context: PassContext, tensors: list[fx.Node], cell: Any
    ) -> None:
        """cell: of every group, as a fake: nobody asks for its offset."""
        self._visited.add(gm)
        for node in list(gm.graph.nodes):
            if not self._is_site(node):
                continue
            site = str(node.meta[g.SITE])
            with gm.graph.inserting_before(node):
                own = self._cell(gm, StateKey(site, "x", site in self.covariances), tensors, cell)
                gm.graph.call_function(OBSERVE, (node.args[0], own, tensors[places.FORWARD]))
                own = self._cell(gm, StateKey(site, "g"), tensors, cell)
            args = list(node.args)
            probe = [own, tensors[places.BACKWARD]]
            args[PROBE_AT[node.target]] = [*probe, own] if self.in_turn else probe
            node.args = tuple(args)
            context.rewrote(node, "observed: input and output gradient")
        for call, body in list(g.bodies(gm)):
            if any(self._is_site(n) for one in g.every_graph(body) for n in one.graph.nodes):
                call.args = (*call.args, *tensors)
                if body not in self._visited:
                    inner = [_placeholder(body, n.name, g.value(n)) for n in tensors]
                    self._graph(body, context, inner, cell)
        gm.recompile()

    def _cell(
        self, gm: fx.GraphModule, key: StateKey, tensors: list[fx.Node], cell: Any
    ) -> fx.Node:
        row = len(self.keys)
        self.keys.append(key)
        node = gm.graph.call_function(torch.ops.aten.select.int, (tensors[places.CELLS], 0, row))
        node.meta["example_value"] = cell
        return node


def static_placeholder(
    gm: fx.GraphModule, name: str, tensor: torch.Tensor, beside: torch.Tensor
) -> fx.Node:
    """A placeholder behind the others, for a tensor with the shape and dtype of `tensor` that the
    runtime binds; its fake is made in the mode, and on the device, of the fake `beside`."""
    return _placeholder(gm, name, _fake(beside, tensor.to(beside.device), name))


def _fake(beside: torch.Tensor, tensor: torch.Tensor, name: str) -> Any:
    mode = detect_fake_mode([beside])
    assert mode is not None
    source = AttrSource(LocalSource("__loka"), name)
    return mode.from_tensor(tensor, static_shapes=True, source=source)


def _placeholder(gm: fx.GraphModule, name: str, fake: Any) -> fx.Node:
    last = [n for n in gm.graph.nodes if n.op == "placeholder"][-1]
    with gm.graph.inserting_after(last):
        node = gm.graph.placeholder(name)
    node.meta["example_value"] = fake
    # Static: CUDA graphs must not copy the state in at every replay.
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    node._dynamo_source = AttrSource(LocalSource("__loka"), name)  # type: ignore[attr-defined]
    return node
