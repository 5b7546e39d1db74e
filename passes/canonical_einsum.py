"""Graph -> graph in which an einsum of one activation with a matrix parameter is F.linear.

`...k,nk->...n`, `bsk,kn->bsn`, and forms that contract another dimension than the last one, such as
`bnd,nk->bkd`: those get a transpose on each side.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes.manager import PassContext


def einsums(gm: fx.GraphModule, context: PassContext) -> None:
    for node in list(gm.graph.nodes):
        if g.is_call(node, torch.einsum) and not node.kwargs and len(node.args) > 1:
            operands = node.args[1:]
            if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
                operands = tuple(operands[0])
            if len(operands) == 2 and any(m.parameter(o) is not None for o in operands):
                why = _rewrite(gm, node, operands, context)
                if why is not None:
                    context.refused(node, f"einsum with a parameter: {why}; left as written")


def _rewrite(
    gm: fx.GraphModule, node: fx.Node, operands: tuple[Any, ...], context: PassContext
) -> str | None:
    terms = re.fullmatch(r"([^,]*),([^,]*)->(.*)", str(node.args[0]).replace(" ", ""))
    if terms is None:
        return "no explicit result"
    left, right, result = terms.groups()
    x, w = operands
    if m.parameter(w) is None or m.tensor(w).dim() != 2:  # type: ignore[union-attr]
        left, right, x, w = right, left, w, x
    if m.parameter(w) is None or m.tensor(x) is None or m.tensor(w).dim() != 2:  # type: ignore[union-attr]
        return "the parameter is no matrix"
    letters = _letters(left, g.value(x).dim())
    out = _letters(result, g.value(node).dim())
    if letters is None or out is None or len(set(right)) != 2 or len(right) != 2:
        return "a repeated index"
    summed = [i for i in right if i in letters and i not in out]
    kept = [i for i in right if i not in letters and i in out]
    if len(summed) != 1 or len(kept) != 1:
        return "it is no product over one index"
    k, n = summed[0], kept[0]
    others = [i for i in letters if i != k]
    if sorted([*others, n]) != sorted(out):
        return "it sums over an index that the parameter has not"
    # The linear's own order of indices; a product that the user wants in another one is turned.
    natural = [*(i for i in out if i != n), n]
    graph = gm.graph
    with graph.inserting_before(node):
        turn = [letters.index(i) for i in [*natural[:-1], k]]
        source = x
        if turn != list(range(len(turn))):
            source = m.call(graph, "permute", (x, turn), like=node)
        weight = w if right == n + k else m.call(graph, torch.t, (w,), like=node)
        dtype = g.value(node).dtype
        y = g.value(source).new_empty((*g.value(source).shape[:-1], _size(w, right, n)))
        new = m.call(graph, m.LINEAR, (source, weight, None), like=node, value=y.to(dtype))
        last = new
        if natural != out:
            back = [natural.index(i) for i in out]
            last = m.call(graph, "permute", (new, back), like=node)
    if not _row_by_row(g.value(last).stride(), g.value(node).stride()):
        for dead in (last, new, weight, source):
            if dead not in (x, w) and not dead.users and dead.op != "placeholder":
                graph.erase_node(dead)
        return "its result would have other strides"
    last.meta["example_value"] = g.value(node)
    context.rewrote(node, f"einsum {node.args[0]!r} -> linear")
    node.replace_all_uses_with(last)
    graph.erase_node(node)
    return None


def _letters(term: str, rank: int) -> list[str] | None:
    """One symbol per dimension, those under `...` numbered from the right; None for repeats."""
    if "..." in term:
        before, _, after = term.partition("...")
        hidden = [str(i) for i in reversed(range(rank - len(before) - len(after)))]
        found = [*before, *hidden, *after]
    else:
        found = list(term)
    return found if len(found) == rank and len(set(found)) == rank else None


def _size(w: Any, indices: str, letter: str) -> Any:
    return g.value(w).shape[indices.index(letter)]


def _row_by_row(ours: Any, theirs: Any) -> bool:
    return len(ours) == len(theirs) and all(
        str(a) == str(b) for a, b in zip(ours, theirs, strict=True)
    )
