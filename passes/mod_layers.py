"""Graph -> the layers that each Mod changes in it, by name, so that users can keep some as written.

A linear goes by its site's name, whichever call of it; other ops by the module that they stand in.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.nn import functional as F

from loka_compile.mod_set import EVERY
from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes import norm_blocks

_BIASED = {F.layer_norm: 3, F.group_norm: 3}
_SWISHES = (F.silu, torch.sigmoid)


def layer_of(node: fx.Node) -> str:
    """`mlp.0` of a node there; of the second call of a linear, too."""
    return g.layer_of(node).partition("#")[0]


def layers(gm: fx.GraphModule) -> dict[str, tuple[str, ...]]:
    """Mod -> names of the layers that it may change, of a canonical graph and its bodies.

    Heads are among them, and so is what a Mod will refuse: no name that a user gives for one of
    these is a mistake.
    """
    found: dict[str, dict[str, None]] = {mod: {} for mod in EVERY}
    for one in g.every_graph(gm):
        for node in one.graph.nodes:
            for mod in _mods_at(node):
                found[mod][layer_of(node)] = None
    return {mod: tuple(names) for mod, names in found.items()}


def _mods_at(node: fx.Node) -> list[str]:
    mods = []
    bias = 2 if m.is_linear(node) else _BIASED.get(node.target)  # type: ignore[arg-type]
    if bias is not None and len(node.args) > bias and node.args[bias] is not None:
        mods.append("no_bias")
    if norm_blocks.is_norm(node):
        mods.append("block_norm")
    if g.is_call(node, *_SWISHES):
        mods.append("hard_swish")
    return mods
