"""Graph -> graph in which a fused chain gives e4m3 straight to the FP8 layers that read it.

The output of BlockNorm and Hard Swish is bounded, so its scale is known beforehand: the producer
writes e4m3 with a static scale, its readers take that instead of quantising, and the bf16 value is
never written. For a reader whose wgrad runs in FP8 the producer writes the transpose too. A
BlockNorm on its own is bounded as well: its FP8 readers take e4m3 with a static scale, and nobody
looks for the maximum of its result.

Observers keep a norm's result in bf16 beside its e4m3. A chain's they make from the u that it keeps
for its backward, at sites that are asked, so that a probed step hands over what a plain one does.

The pass also drops what only a backward needs (u and r) in graphs that have none.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any
from typing import cast

import torch
from torch import fx

from loka_compile.lowering import chain
from loka_compile.lowering import ops
from loka_compile.lowering.autograd import HANDED_ACT
from loka_compile.lowering.bounded import BOUNDED
from loka_compile.lowering.epilogue_ops import LINEAR_EPILOGUE
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.recipes import Operand
from loka_compile.passes import graph as g
from loka_compile.passes import known_values
from loka_compile.passes import matching as m
from loka_compile.passes.manager import PassContext
from loka_compile.probe import observers  # noqa: F401  (defines the ops)

LINEAR = torch.ops.loka.linear.default
FUSED = torch.ops.loka.linear_block_norm_act.default
BLOCK_NORM = torch.ops.loka.block_norm.default
OBSERVE = torch.ops.loka.observe.default
#: Where `probe` stands in each op's arguments.
PROBE_AT: dict[Any, int] = {LINEAR: 6, LINEAR_EPILOGUE: 6, FUSED: 13}
VIEWS = ("view", "reshape", "flatten", torch.flatten, torch.reshape)

#: Positions in the ops' arguments; `_KERNELS` is where fwd, dgrad, wgrad begin.
_KERNELS: dict[Any, int] = {LINEAR: 3, LINEAR_EPILOGUE: 3, FUSED: 9}
_HANDED: dict[Any, tuple[int, int, int]] = {
    LINEAR: (7, 8, 9),
    LINEAR_EPILOGUE: (7, 8, 9),
    FUSED: (1, 2, 14),
}
_OUT, _SAVE = 12, 17


class HandOver:
    """Runs last, on `loka::` ops; with observers only where they are asked in turn: what they read
    is computed for each that is asked."""

    name = "handover"

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        training = torch.is_grad_enabled()
        for node in list(gm.graph.nodes):
            if g.is_call(node, BLOCK_NORM):
                _from_norm(gm, node, training, context)
            if not g.is_call(node, FUSED):
                continue
            if not training:
                set_arguments(node, {_SAVE: False})
            if not node.args[9].startswith(chain.OWN):
                continue
            why = _hand_over(gm, node, training, context)
            if why is not None:
                context.refused(node, f"no e4m3 hand-over: {why}")


def set_arguments(node: fx.Node, values: Mapping[int, Any]) -> None:
    """Set some arguments of a `loka::` op, by position."""
    args: list[Any] = list(node.args)
    for at, value in values.items():
        args[at] = value
    node.args = tuple(args)
    if node.target is FUSED and not values.keys().isdisjoint((_OUT, _SAVE)):
        # Shapes and dtypes of the results follow.
        given = cast("tuple[Any, ...]", fx.map_arg(node.args, g.value))
        node.meta["example_value"] = known_values.result_of(FUSED, ops.DIRECT[FUSED], given)


def _hand_over(
    gm: fx.GraphModule, node: fx.Node, training: bool, context: PassContext
) -> str | None:
    act, gate = node.args[7], node.args[8]
    if gate or act not in ("none", "hard_swish"):
        return f"the output of {'a gate' if gate else act} has no bound to scale by"
    read = [u for u in node.users if g.is_call(u, operator.getitem) and u.args[1] == 0]
    if len(read) != 1:
        return "nobody reads the result alone"
    (y,) = read
    turned = False
    watching = [u for u in y.users if g.is_call(u, OBSERVE)]
    if watching and act != HANDED_ACT:
        return "observers read it in high precision"
    readers = [u for u in y.users if u not in watching]
    for reader in readers:
        why = _why_not(reader, y)
        if why is not None:
            return why
        turned |= training and _reads_transposed(reader)
    set_arguments(node, {_OUT: "y8t" if turned else "y8"})
    with gm.graph.inserting_after(y):
        parts = [m.call(gm.graph, operator.getitem, (node, i), like=y) for i in (1, 2)]
        if turned:
            parts.append(m.call(gm.graph, operator.getitem, (node, 5), like=y))
    for reader in readers:
        set_arguments(reader, dict(zip(_HANDED[reader.target], parts, strict=False)))
    if watching:
        _show(gm, node, watching, [r for r in readers if r.args[PROBE_AT[r.target]]])
    names = ", ".join(_name(u) for u in readers)
    context.rewrote(node, f"hands e4m3 to {names}" + (", and its transpose" if turned else ""))
    return None


def _show(
    gm: fx.GraphModule, node: fx.Node, watching: list[fx.Node], readers: list[fx.Node]
) -> None:
    """Observers of the input of `readers` are told what it is made of."""
    gain = cast("fx.Node | None", node.args[4])
    with gm.graph.inserting_after(node):
        u = m.call(gm.graph, operator.getitem, (node, 3), like=node)
    made = [u]
    if gain is not None:
        with gm.graph.inserting_after(u):
            made.append(m.call(gm.graph, "detach", (gain,), like=node))
    for one in watching:
        _, cell, order = one.args[:3]
        one.args = (u, cell, order, made[1] if gain is not None else None, HANDED_ACT)
    for reader in readers:
        at = PROBE_AT[reader.target]
        set_arguments(reader, {at: [*cast("list[Any]", reader.args[at]), *made]})


def _from_norm(gm: fx.GraphModule, norm: fx.Node, training: bool, context: PassContext) -> None:
    """Every value that shows the norm's result goes as e4m3 to its readers that take it."""
    values = [u for u in norm.users if g.is_call(u, operator.getitem) and u.args[1] == 0]
    for value in values:
        # Appended to while walked: views of views.
        values += [u for u in value.users if g.is_call(u, *VIEWS) and u.args[0] is value]
        readers = [r for r in value.users if _why_not(r, value) is None]
        readers = [r for r in readers if r.args[_HANDED[r.target][0]] is None]
        if training:
            # A wgrad in high precision keeps the value as it is.
            readers = [r for r in readers if _reads_transposed(r)]
        if not readers:
            continue
        _, gain, block, *_ = cast("tuple[Any, ...]", norm.args)
        # Not differentiable: the gradient goes through the value itself.
        with gm.graph.inserting_after(value):
            last = fixed = m.call(gm.graph, "detach", (value,), like=value)
        if gain is not None:
            with gm.graph.inserting_after(fixed):
                last = gain = m.call(gm.graph, "detach", (gain,), like=value)
        with gm.graph.inserting_after(last):
            made = m.call(gm.graph, BOUNDED, (fixed, gain, block, training), like=value)
        with gm.graph.inserting_after(made):
            parts = [m.call(gm.graph, operator.getitem, (made, i), like=value) for i in range(3)]
        for reader in readers:
            handed = parts if training else parts[:2]
            set_arguments(reader, dict(zip(_HANDED[reader.target], handed, strict=False)))
        what = ", ".join(_name(r) for r in readers)
        context.rewrote(norm, f"its result goes as e4m3 with a static scale to {what}")


def _name(reader: fx.Node) -> str:
    return str(reader.meta.get(g.SITE) or m.name_of(reader))


def _why_not(reader: fx.Node, y: fx.Node) -> str | None:
    """Why `reader` cannot take e4m3 for `y`."""
    if reader.op == "output":
        return "the result leaves the graph"
    if not g.is_call(reader, *_KERNELS):
        return f"{m.name_of(reader)} reads it in high precision"
    if sum(a is y for a in reader.args) != 1 or reader.args[0] is not y:
        return f"{m.name_of(reader)} reads it as more than its input"
    if _operand(reader, "fwd") is None:
        return f"the forward of {reader.meta.get(g.SITE)} stays in high precision"
    return None


def _operand(reader: fx.Node, direction: str) -> Operand | None:
    """The rule of the operand that stands for the reader's input, if e4m3 with one scale fits."""
    first = _KERNELS[reader.target]
    kernel = cast("str", reader.args[first + (2 if direction == "wgrad" else 0)])
    if kernel == HIGH_PRECISION:
        return None
    library, recipe, _ = split_kernel_name(kernel)
    rule = library.recipes[recipe].gemm(direction)
    if rule is None:
        return None
    operand = rule.b if direction == "wgrad" else rule.a
    # Scales along the contraction are not what one static scale can stand for.
    return operand if operand.dtype == chain.E4M3 and not operand.blocks else None


def _reads_transposed(reader: fx.Node) -> bool:
    return _operand(reader, "wgrad") is not None
