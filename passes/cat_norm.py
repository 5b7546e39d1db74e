"""Graph -> the same function with block_norm of a concatenation taken part by part.

    block_norm(cat([a, b], -1)) [-> hardswish]      cat([block_norm(a) ..., block_norm(b) ...], -1)

Where every part ends at the end of a block no statistic runs over two parts, so nothing changes but
that each part's own linear can take its norm in. Only done for parts that are linears.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes.aliases import Facts
from loka_compile.passes.block_norm import BLOCK_NORM
from loka_compile.passes.manager import PassContext

_CAT = (torch.cat, torch.concat, torch.concatenate)


def spread(gm: fx.GraphModule, context: PassContext) -> None:
    for norm in list(gm.graph.nodes):
        if not g.is_call(norm, BLOCK_NORM) or not g.is_call(norm.args[0], *_CAT):
            continue
        parts = _parts(norm.args[0])
        if not any(map(m.is_linear, parts)):
            continue
        why = _why_not(norm, parts) or _rewrite(gm, norm, parts, context)
        if why is not None:
            context.refused(norm, f"norm of concatenated linears not taken apart: {why}")


def _parts(cat: Any) -> list[Any]:
    args = m.bound(cat, ("tensors", "dim"), 0)
    if args is None or not isinstance(args[0], (list, tuple)):
        return []
    last = g.value(cat).dim() - 1
    return list(args[0]) if args[1] in (-1, last) else []


def _why_not(norm: fx.Node, parts: list[Any]) -> str | None:
    cat: Any = norm.args[0]
    block: Any = norm.args[2]
    widths = [g.value(p).shape[-1] for p in parts]
    if len(cat.users) > 1:
        return "the concatenation has other readers"
    if not all(isinstance(w, int) for w in widths):
        return "a part's width is not a number"
    if any(w % block for w in widths):
        shown = ", ".join(map(str, widths))
        return f"a block of {block} features runs over the parts of {shown}"
    results = list(norm.users)
    if len(results) != 1 or not g.is_call(results[0], operator.getitem) or results[0].args[1] != 0:
        return "its statistics are read"
    return None


def _rewrite(
    gm: fx.GraphModule, norm: fx.Node, parts: list[Any], context: PassContext
) -> str | None:
    (result,) = norm.users
    last = result
    reader = next(iter(result.users)) if len(result.users) == 1 else None
    facts = Facts(gm)
    if g.is_call(reader, F.hardswish) and not g.is_mutation(reader):  # type: ignore[arg-type]
        last = reader  # type: ignore[assignment]
    cat: Any = norm.args[0]
    _, gain, block, eps = norm.args
    why = facts.obstacle(cat, last, [*parts, gain], inside=[norm, result])
    if why is not None:
        return why
    context.rewrote(norm, f"block_norm of {len(parts)} concatenated parts taken part by part")
    graph, start, new = gm.graph, 0, []
    with graph.inserting_before(last):
        for part in parts:
            width = g.value(part).shape[-1]
            # As cat promotes its parts, of which autocast makes some narrower.
            wide = m.cast(graph, part, g.value(cat).dtype, like=norm)
            mine = gain
            if gain is not None:
                mine = m.call(graph, "narrow", (gain, 0, start, width), like=norm)
            pair = m.call(graph, BLOCK_NORM, (wide, mine, block, eps), like=norm)
            out = m.call(graph, operator.getitem, (pair, 0), like=result)
            if last is not result:
                out = m.call(graph, F.hardswish, (out,), like=last)
            new.append(out)
            start += width
        whole = m.call(graph, torch.cat, (new, -1), like=last, value=g.value(last))
    last.replace_all_uses_with(whole)
    for dead in dict.fromkeys((last, result, norm, cat)):
        graph.erase_node(dead)
    return None
