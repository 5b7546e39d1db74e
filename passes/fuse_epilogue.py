"""A linear and what stands behind it -> one `loka::linear_epilogue`, the same maths.

Bias, activation, sums, products and the norm join the GEMM in one op that decomposes to plain aten:
the values between are never rounded to the narrow dtype, and the site's gradient is the GEMM's.
"""

from __future__ import annotations

import operator
from typing import Any
from typing import cast

from torch import fx

from loka_compile.lowering.epilogue_ops import LINEAR_EPILOGUE
from loka_compile.lowering.epilogue_ops import SCALE
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes.aliases import Facts
from loka_compile.passes.batched_linear import swapped
from loka_compile.passes.chains import REGROUP
from loka_compile.passes.epilogue_chains import Epilogue
from loka_compile.passes.epilogue_chains import forms
from loka_compile.passes.epilogue_chains import splits
from loka_compile.passes.manager import PassContext


def fuse(
    gm: fx.GraphModule, linear: fx.Node, facts: Facts, context: PassContext
) -> tuple[fx.Node | None, str | None]:
    """Fuse the longest form that may be: (the norm that it has, why no longer form or none)."""
    if swapped(linear.args[0]) is not None:
        return None, "its input is transposed: alone it may run as a batched product without copies"
    first: str | None = None
    for chain in forms(linear):
        why = _why_not(chain, facts)
        if why is None:
            _rewrite(gm, chain, facts, context)
            return chain.norm, first
        first = first or f"{chain}: {why}"
    return None, first


def _why_not(chain: Epilogue, facts: Facts) -> str | None:
    reader = m.leak(chain.nodes)
    if reader is not None:
        return f"{reader.name} has other readers"
    if not m.row_major(g.value(chain.last)):
        return "the result follows the strides of another tensor"
    kept = [chain.factor, *(chain.addends if chain.scale is not None else ())]
    for node in kept:
        writer = None if node is None else facts.written(node, after=chain.linear)
        if writer is not None:
            return f"a value that the backward needs is written to later ({m.name_of(writer)})"
    x, w, bias = chain.linear.args
    gain = None if chain.norm is None else chain.norm.args[1]
    reads = [x, w, bias, chain.scale, gain, *chain.operands]
    return facts.obstacle(chain.linear, chain.last, reads, inside=chain.nodes, autocast=False)


def _rewrite(gm: fx.GraphModule, chain: Epilogue, facts: Facts, context: PassContext) -> None:
    linear, norm, last, graph = chain.linear, chain.norm, chain.last, gm.graph
    x, w, bias = cast("tuple[fx.Node, fx.Node, fx.Node | None]", linear.args)
    dtype, features = g.value(linear).dtype, g.value(linear).shape[-1]
    gain: Any = None
    block: Any = 0
    eps: Any = 0.0
    # Before the result, not at the linear: operands may come later than that.
    behind = last.prev
    with graph.inserting_before(last):
        x, w = m.cast(graph, x, dtype, like=linear), m.cast(graph, w, dtype, like=linear)
        bias = None if bias is None else m.cast(graph, bias, dtype, like=linear)
        if norm is not None:
            gain, block, eps = norm.args[1:4]
            groups = features // g.value(norm.args[0]).shape[-1]
            if gain is not None and groups > 1:
                gain = m.call(graph, "repeat", (gain, groups), like=norm)
        addends = [_shaped(graph, a, chain) for a in chain.addends]
        while len(addends) > 1:
            addends[:2] = [m.call(graph, operator.add, tuple(addends[:2]), like=last)]
        args: tuple[Any, ...] = (x, w, bias, *((HIGH_PRECISION,) * 3), [], *((None,) * 7))
        args = (*args, chain.scale, addends[0] if addends else None, chain.pre, block, eps, gain)
        args = (*args, chain.act, chain.gate, _shaped(graph, chain.factor, chain))
        args = (*args, _shaped(graph, chain.residual, chain), g.value(last).dtype)
        fused = m.call(graph, LINEAR_EPILOGUE, args, like=linear)
        out = m.call(graph, operator.getitem, (fused, 0), like=last)
        if chain.view is not None:
            out = m.call(graph, chain.view.target, (out, *chain.view.args[1:]), like=last)
    context.rewrote(fused, f"fused {chain}" + _beside(chain))
    facts.inserted(behind, last)
    facts.replace(last, out)
    for node in sorted(chain.nodes[:-1], key=facts.order.__getitem__, reverse=True):
        graph.erase_node(node)
    for operand in dict.fromkeys(chain.operands):
        if not operand.users and g.is_call(operand, *REGROUP):
            # A view that nobody reads now would still be a reader of what it shows.
            graph.erase_node(operand)


def _beside(chain: Epilogue) -> str:
    """What to say of a norm that `linear_block_norm_act`, which has a kernel, does not take in."""
    kept = chain.norm is not None and chain.linear.args[2] is not None
    return " (bias kept, so the norm is not fused into this GEMM: exact, in plain ops)" * kept


def _shaped(graph: fx.Graph, operand: fx.Node | None, chain: Epilogue) -> Any:
    """`operand` in the shape of the linear's own result: one column spread, groups joined."""
    if operand is None:
        return None
    value = g.value(operand)
    features = g.value(chain.linear).shape[-1]
    grouped = value.dim() > g.value(chain.linear).dim()
    width = g.value(chain.view).shape[-1] if grouped else features
    if value.shape[-1] != width:
        sizes = [*((-1,) * (value.dim() - 1)), width]
        operand = m.call(graph, "expand", (operand, *sizes), like=operand)
    if grouped and operand.op != "placeholder" and splits_of(operand, chain.linear):
        # What it was made from has the shape, and may be a linear that takes a sum in itself.
        return operand.args[0]
    if grouped:
        operand = m.call(graph, "flatten", (operand, -2), like=operand)
    return operand


def splits_of(view: fx.Node, linear: fx.Node) -> bool:
    """`view` shows features of a value like the linear's result in groups."""
    below = view.args[0] if g.is_call(view, *REGROUP) else None
    if m.tensor(below) is None or not splits(view, linear):
        return False
    return g.value(below).dim() == g.value(linear).dim() and splits(view, cast("fx.Node", below))


def label(node: fx.Node) -> str:
    """`bias+silu+factor`: what a `loka::linear_epilogue` has besides its linear."""
    (_, _, bias, *_), rest = node.args, cast("tuple[Any, ...]", node.args[SCALE:])
    scale, addend, pre, block, _, _, act, gate, factor, residual, _ = rest
    parts = {
        "bias": bias is not None,
        "scale": scale is not None,
        "addend": addend is not None,
        str(pre): pre != "none",
        "block_norm": block,
        str(act): act != "none",
        "gate": gate,
        "factor": factor is not None,
        "residual": residual is not None,
    }
    return "+".join(name for name, there in parts.items() if there)
