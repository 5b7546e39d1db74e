"""Graph -> graph with one op per linear -> block_norm -> hardswish chain, plain or gate form.

The fused op computes what the chain computes, with fewer roundings in between. It does not
autocast: the casts that autocast makes at the linear are written out. A view that splits the
linear's features into groups is put behind it, since BlockNorm over a group's features is BlockNorm
over the row with a block that divides the group. A residual or another linear's result that is
added before the norm is taken in, too. Every near miss is refused with its reason.
"""

from __future__ import annotations

import operator
from typing import Any
from typing import cast

import torch
from torch import fx
from torch.nn import functional as F

from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.passes import cat_norm
from loka_compile.passes import fuse_epilogue
from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes import stacked_sum
from loka_compile.passes.aliases import Facts
from loka_compile.passes.block_norm import BLOCK_NORM
from loka_compile.passes.chains import Chain
from loka_compile.passes.chains import Path
from loka_compile.passes.chains import chains_of
from loka_compile.passes.chains import down
from loka_compile.passes.epilogue_chains import why_no_groups
from loka_compile.passes.manager import PassContext
from loka_compile.passes.unfused import why_alone

FUSED = torch.ops.loka.linear_block_norm_act.default

_PRELU = (torch.prelu, F.prelu)
_OTHER_NORMS = (F.batch_norm, torch.batch_norm, F.group_norm, torch.group_norm)


class Fuse:
    """Runs after sites are named, with Mods on or off; the linear's site name goes to the op."""

    name = "fuse"

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        transformed = m.transformed(gm)
        if not transformed:
            cat_norm.spread(gm, context)
            stacked_sum.spread(gm, context)
        facts = Facts(gm)
        missed: dict[fx.Node, tuple[fx.Node, str]] = {}
        alone: dict[fx.Node, str] = {}
        for node in list(gm.graph.nodes):
            if g.is_call(node, *_OTHER_NORMS):
                _refuse_norm(node, context)
            elif g.is_call(node, *_PRELU) and _reaches_linear(node.args[0]):
                context.refused(node, "PReLU has a learned slope: it stays an op of its own")
            elif g.is_call(node, BLOCK_NORM):
                path = down(node.args[0])
                if not m.is_linear(path.below):
                    continue
                why = "inside a functorch transform" if transformed else path.why_not
                if why is None:
                    why = _fuse_one(gm, node, path, facts, context)
                if why is not None:
                    missed[node] = path.below, why
        if not transformed:
            self._epilogues(gm, facts, missed, alone, context)
        for norm, (linear, why) in missed.items():
            context.refused(norm, f"linear + block_norm not fused: {why}")
            if m.is_linear(linear):
                # Under the linear's own name too; the near miss has the norm's.
                context.remarked(linear, f"not fused: {why}")
        told = {linear for linear, _ in missed.values()}
        for node in gm.graph.nodes:
            if m.is_linear(node) and node not in told:
                reason = "inside a functorch transform" if transformed else alone.get(node)
                reason = reason or why_no_site(node, context) or why_alone(node)
                context.remarked(node, f"not fused: {reason}")

    def _epilogues(
        self,
        gm: fx.GraphModule,
        facts: Facts,
        missed: dict[fx.Node, tuple[fx.Node, str]],
        alone: dict[fx.Node, str],
        context: PassContext,
    ) -> None:
        """What the first op does not offer, exactly as written. Takes norms out of `missed`, and
        puts into `alone` why a linear was left."""
        for linear in list(gm.graph.nodes):
            if m.is_linear(linear) and why_no_site(linear, context) is None:
                norm, why = fuse_epilogue.fuse(gm, linear, facts, context)
                missed.pop(norm, None)  # type: ignore[arg-type]
                if why is not None:
                    alone[linear] = why


def _fuse_one(
    gm: fx.GraphModule, norm: fx.Node, path: Path, facts: Facts, context: PassContext
) -> str | None:
    """Fuse the longest form that may be; else say why not."""
    why = why_no_site(path.below, context) or _why_bias(path.below)
    why = why or why_no_groups(path.below, norm)
    if why is not None:
        return why
    reasons = []
    for chain in chains_of(norm, path):
        why = _why_not(chain, facts)
        if why is None:
            _rewrite(gm, chain, facts, context)
            return None
        reasons.append(why)
    return reasons[0] if reasons else "nobody reads its result alone"


def why_no_site(linear: fx.Node, context: PassContext) -> str | None:
    if linear.meta.get(g.SITE) in context.heads:
        return "the linear is a head"
    if m.parameter(linear.args[1]) is None:
        return "the weight is computed (weight_norm, spectral_norm, ...), not a plain parameter"
    return None


def _why_bias(linear: fx.Node) -> str | None:
    return None if linear.args[2] is None else "the linear keeps its bias"


def _width(norm: fx.Node) -> Any:
    return g.value(norm.args[0]).shape[-1]


def _why_not(chain: Chain, facts: Facts) -> str | None:
    reader = m.leak(chain.nodes)
    if reader is not None:
        return f"{reader.name} has other readers"
    dtype = g.value(chain.linear).dtype
    for node in chain.nodes:
        if m.is_cast(node) and not m.holds(g.value(node).dtype, dtype):
            return f"a cast to {g.value(node).dtype} rounds the linear's {dtype} result"
    x, w, _ = chain.linear.args
    if chain.addend is not None and g.value(chain.addend).dtype != dtype:
        # The op keeps the normalised sum in the linear's dtype; `linear_epilogue` keeps it whole.
        return f"the addend is of {g.value(chain.addend).dtype}, the linear of {dtype}"
    if chain.flat:
        view, value = g.value(chain.view), g.value(chain.linear)
        if view.dim() != value.dim() + 1:
            return "the addend lies behind a view that does more than split the features"
    reads = [x, w, chain.norm.args[1], chain.addend]
    return facts.obstacle(chain.linear, chain.last, reads, inside=chain.nodes, autocast=False)


def _reaches_linear(node: Any) -> bool:
    """`node` is a linear, or a block_norm of one."""
    below = down(node).below
    if g.is_call(below, operator.getitem) and g.is_call(below.args[0], BLOCK_NORM, FUSED):
        return g.is_call(below.args[0], FUSED) or m.is_linear(down(below.args[0].args[0]).below)
    return m.is_linear(below)


def _refuse_norm(node: fx.Node, context: PassContext) -> None:
    if not m.is_linear(down(node.args[0]).below):
        return
    if g.is_call(node, F.group_norm, torch.group_norm):
        x = m.tensor(node.args[0])
        over_rows = x is not None and x.dim() == 2
        why = (
            "the Mod block_norm is off" if over_rows else "it does not run over the last dimension"
        )
        context.refused(node, f"group_norm after a linear: {why}")
        return
    training = node.args[5] if len(node.args) > 5 else node.kwargs.get("training", False)
    context.refused(
        node,
        "batch_norm after a linear needs the statistics of the batch in training: left as written"
        if training
        else "batch_norm after a linear is no block norm: left as written",
    )


def _rewrite(gm: fx.GraphModule, chain: Chain, facts: Facts, context: PassContext) -> None:
    linear, norm, last, graph = chain.linear, chain.norm, chain.last, gm.graph
    x, w, _ = cast("tuple[fx.Node, fx.Node, None]", linear.args)
    gain, block, eps = norm.args[1:4]
    dtype = g.value(linear).dtype
    groups = g.value(linear).shape[-1] // _width(norm)
    # Before the result, not at the linear: gain, casts and view sizes may come later than that.
    behind = last.prev
    with graph.inserting_before(last):
        x, w = m.cast(graph, x, dtype, like=norm), m.cast(graph, w, dtype, like=norm)
        if gain is not None and groups > 1:
            gain = m.call(graph, "repeat", (gain, groups), like=norm)
        addend = chain.addend
        if addend is not None and chain.flat:
            addend = m.call(graph, "flatten", (addend, -2), like=norm)
        kernels = (HIGH_PRECISION,) * 3
        args: tuple[Any, ...] = (x, None, None, w, gain, block, eps, chain.act, chain.gate)
        args = (*args, *kernels, "y", [], None, None, None, True, None, None, addend)
        fused = m.call(graph, FUSED, args, like=linear)
        out = m.call(graph, operator.getitem, (fused, 0), like=last)
        if chain.view is not None:
            sizes = chain.view.args[1:]
            out = m.call(graph, chain.view.target, (out, *sizes), like=last)
        out = m.cast(graph, out, g.value(last).dtype, like=last)
    context.rewrote(fused, f"fused {chain}")
    facts.inserted(behind, last)
    facts.replace(last, out)
    for node in sorted(chain.nodes[:-1], key=facts.order.__getitem__, reverse=True):
        graph.erase_node(node)
