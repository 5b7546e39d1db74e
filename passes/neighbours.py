"""Graph -> what the price of each GEMM site hangs on besides its GEMM. Changes nothing.

That is its own epilogue, if it is fused, and the fused site whose output it reads: such a producer
could hand its output over as e4m3, if nothing but this site's GEMM reads it. A norm that no GEMM
takes in hands e4m3 to each of its readers that takes it, whatever else reads it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from loka_compile.lowering.epilogue import Epilogue
from loka_compile.lowering.epilogue_ops import LINEAR_EPILOGUE
from loka_compile.passes import graph as g
from loka_compile.passes.handover import VIEWS
from loka_compile.passes.interaction import would_join
from loka_compile.passes.pointwise_match import match

BLOCK_NORM = torch.ops.loka.block_norm.default
LINEAR = torch.ops.loka.linear.default
FUSED = torch.ops.loka.linear_block_norm_act.default
#: Where each op has its arguments: the e4m3 input's place says that it is handed over already.
_BLOCK, _GAIN, _ACT, _GATE, _ADDEND = 5, 4, 7, 8, 20


#: Of a linear that one kernel runs together with the products around it, in high precision.
JOINS = "part of one kernel with the factorisation machine's products, which reads their input once"


@dataclass(frozen=True)
class Chain:
    """stays: why the site is better off in high precision whatever its GEMM alone would gain.
    bounded: the value that it reads, if that is the result of a norm on its own."""

    epilogue: str = ""
    producer: str | None = None
    stays: str = ""
    bounded: str | None = None


def chains_of(gm: fx.GraphModule) -> dict[str, Chain]:
    """Site name -> Chain, of every `loka::` linear, after dispatch."""
    found: dict[str, Chain] = {}
    for number, one in enumerate(g.every_graph(gm)):
        for node in one.graph.nodes:
            if g.is_call(node, LINEAR, LINEAR_EPILOGUE, FUSED) and node.meta.get(g.SITE):
                epilogue, producer = _epilogue(node), _producer(node)
                bounded = _bounded(node, number)
                found[str(node.meta[g.SITE])] = Chain(epilogue, producer, bounded=bounded)
        for node in would_join(one):
            name = str(node.meta.get(g.SITE))
            found[name] = replace(found.get(name, Chain()), stays=JOINS)
    return found


def _epilogue(node: fx.Node) -> str:
    if not g.is_call(node, FUSED):
        found = match(node)
        return "" if found is None else str(found.epilogue)
    block: Any = node.args[_BLOCK]
    act, gain, gate = node.args[_ACT], node.args[_GAIN], node.args[_GATE]
    added = node.args[_ADDEND] is not None
    return str(Epilogue(int(block), str(act), gain is not None, bool(gate), added))


def _producer(node: fx.Node) -> str | None:
    x = node.args[0]
    if not g.is_call(x, operator.getitem):
        return None
    assert isinstance(x, fx.Node)
    source = x.args[0]
    if not g.is_call(source, FUSED) or x.args[1] != 0 or not _feeds_only(x, node):
        return None
    assert isinstance(source, fx.Node)
    gate, act = source.args[_GATE], source.args[_ACT]
    if gate or act not in ("none", "hard_swish"):
        # Unbounded: there is no static scale for its output.
        return None
    return str(source.meta.get(g.SITE) or "") or None


def _bounded(node: fx.Node, graph: int) -> str | None:
    x = below = node.args[0]
    while g.is_call(below, *VIEWS):
        below = below.args[0]  # type: ignore[union-attr]
    if not g.is_call(below, operator.getitem):
        return None
    assert isinstance(x, fx.Node) and isinstance(below, fx.Node)
    norm = g.is_call(below.args[0], BLOCK_NORM) and below.args[1] == 0
    once = sum(a is x for a in node.args) == 1
    return f"{graph}/{x.name}" if norm and once else None


def _feeds_only(value: fx.Node, reader: fx.Node) -> bool:
    """`reader` alone reads `value`; observers do not count."""
    observe = torch.ops.loka.observe.default
    return all(u is reader or g.is_call(u, observe) for u in value.users)
