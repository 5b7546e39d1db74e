"""Graph -> graph with Hard Swish for every swish, and hard sigmoid in v * sigmoid(norm(v)) gates.

Other activations stay, and so do other sigmoids: outside this gate they are no swish.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes import norm_blocks
from loka_compile.passes.block_norm import BLOCK_NORM
from loka_compile.passes.mod import Mod
from loka_compile.passes.pattern_site import Match
from loka_compile.user_patterns import pattern

KEPT = "activation kept: the option keep, or the plan, says so"


@pattern(example=lambda: (torch.empty(4, 8),), says="silu -> hardswish")
def swish(x: Any) -> Any:
    return F.silu(x)


@swish.when
def _unless_kept(match: Match) -> bool | str:
    return KEPT if match.kept("hard_swish") else True


@swish.replace
def _hard_swish(x: Any) -> Any:
    return F.hardswish(x)


@pattern(example=lambda: (torch.empty(4, 8),), says="gate sigmoid -> hardsigmoid")
def gate(normed: Any) -> Any:
    return torch.sigmoid(normed)


@gate.replace
def _hard_gate(normed: Any) -> Any:
    return F.hardsigmoid(normed)


@gate.when
def _of_its_own_norm(match: Match) -> bool | str:
    """Only the sigmoid changes, so casts may stand anywhere in v * sigmoid(norm(v))."""
    sigmoid, norm = match.result, norm_below(match.node("normed"))
    product = None if norm is None else _product(sigmoid, m.uncast(norm.args[0])[0])
    if norm is None or product is None:
        return ""
    if match.kept("hard_swish"):
        return KEPT
    if len(sigmoid.users) > 1:
        return "gate v * sigmoid(norm(v)): the sigmoid has other readers"
    why = match.obstacle(norm, product, product.args)
    return True if why is None else f"gate v * sigmoid(norm(v)): {why}"


HARD_SWISH = Mod("hard_swish", silu=swish, sigmoid=gate)


def _product(sigmoid: fx.Node, v: Any) -> fx.Node | None:
    """What multiplies `v` by `sigmoid`, both seen through casts."""
    for node in _readers(sigmoid):
        for one, other in m.operands(node, m.MUL):
            if m.uncast(other)[0] is sigmoid and m.uncast(one)[0] is v:
                return node
    return None


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        yield user
        if m.is_cast(user):
            yield from _readers(user)


def norm_below(node: Any) -> fx.Node | None:
    """The norm over the last dimension whose result `node` is, seen through casts.

    A norm that stays as it is written (its Mod is off, or keeps it) gates like any other.
    """
    below = m.uncast(node)[0]
    for value, bias in m.operands(below, m.ADD):
        # The bias of a norm that became a block_norm and kept it.
        if m.parameter(bias) is not None and g.value(bias).dim() == 1:
            below = m.uncast(value)[0]
    if norm_blocks.is_norm(below) and norm_blocks.over_last(below):
        return below
    if g.is_call(below, operator.getitem) and below.args[1] == 0:
        norm = below.args[0]
        if g.is_call(norm, BLOCK_NORM):
            return norm
    return None
