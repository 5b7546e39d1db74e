"""Training graph -> the same graph whose FP8 sites have cells for the maxima that they find anyway.

The cells are a few placeholders behind Dynamo's own, bound by the runtime; each site's op gets a
view of its own. No node computes anything more (`lowering/meters.py`). Sites in bodies of
higher-order ops have none.
"""

from __future__ import annotations

import torch
from torch import fx

from loka_compile.lowering import meters
from loka_compile.passes import graph as g
from loka_compile.passes.manager import PassContext
from loka_compile.passes.observe import PROBE_AT
from loka_compile.passes.observe import static_placeholder


class Record:
    """Runs last, never in a graph with observers. `sites`: names, in the order of the cells."""

    name = "record"

    def __init__(self, sites: frozenset[str]) -> None:
        """sites: those that run FP8 anywhere."""
        self.wanted = sites
        self.sites: list[str] = []
        self._visited = False

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        if self._visited or not torch.is_grad_enabled():
            return
        self._visited = True
        nodes = [
            node
            for node in gm.graph.nodes
            if node.op == "call_function"
            and node.target in PROBE_AT
            and node.meta.get(g.SITE) in self.wanted
        ]
        if not nodes:
            return
        like = g.value(nodes[0].args[0])
        # The cells lie on one device, as the sites of nearly every graph do.
        nodes = [node for node in nodes if g.value(node.args[0]).device == like.device]
        number, *shape = meters.shape_of(len(nodes))
        # Each a tensor of its own: the fake of a view costs many times as much. What the runtime
        # binds are views, as far apart as Inductor wants inputs to be aligned.
        tensors = [
            static_placeholder(gm, f"loka_cells_{i}", torch.empty(shape, dtype=torch.int64), like)
            for i in range(number)
        ]
        # Views of equal shape; nobody asks for the offset, and a fake of each would be dear.
        views = [g.value(held).select(0, 0) for held in tensors]
        for index, node in enumerate(nodes):
            number, row = meters.place_of(index, len(nodes))
            held = tensors[number]
            with gm.graph.inserting_before(node):
                own = gm.graph.call_function(torch.ops.aten.select.int, (held, 0, row))
            own.meta["example_value"] = views[number]
            args = list(node.args)
            args[PROBE_AT[node.target]] = [own]
            node.args = tuple(args)
            self.sites.append(str(node.meta[g.SITE]))
            context.rewrote(node, "records the maxima of its operands")
        gm.recompile()
