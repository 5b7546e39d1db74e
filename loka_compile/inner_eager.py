"""inner="aot_eager": what AOTAutograd traced, node by node, with our observers called as they are.

Functionalisation wraps an op that writes to an argument in a higher-order op. Inductor takes it
apart again; nothing does where the graph runs node by node, and a mode that is active then, such as
that of a selective checkpoint around the compiled graph, has no rule for it and raises.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def compiler(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """A forward's or backward's graph -> what runs it. To be given to AOTAutograd."""
    from torch._dynamo.backends.debugging import boxed_nop

    call_directly(gm.graph)
    return boxed_nop(gm, example_inputs)


def call_directly(graph: fx.Graph) -> None:
    """auto_functionalized_v2(loka op, ...) -> loka op(...), and the copies behind it go.

    Ours say that they write to a whole tensor, which keeps their order, and do not: it needs no
    copy of its own.
    """
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.auto_functionalized_v2
    ):
        op = node.args[0]
        if not isinstance(op, torch._ops.OpOverload) or op.namespace != "loka":
            continue
        named = dict(node.kwargs)
        bases = named.pop("_all_bases", ())
        at = [name for name in named if name.startswith("_")]
        reads = all(u.target is operator.getitem and u.args[1] == 1 for u in node.users)
        if len(bases) != 1 or len(at) != 1 or not at[0].endswith("_base_index") or not reads:
            continue  # A view, or a spelling of a later torch: it runs as it is.
        named.pop(at[0])
        named[at[0].removeprefix("_").removesuffix("_base_index")] = bases[0]
        with graph.inserting_before(node):
            graph.call_function(op, (), named).meta.update(node.meta)
        for user in list(node.users):
            user.replace_all_uses_with(bases[0])
            graph.erase_node(user)
        graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if node.args[0] is node.args[1] and not node.users:
            graph.erase_node(node)
