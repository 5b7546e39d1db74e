"""Heads and norms of a model as the backend sees them, from one traced run on example inputs.

Dynamo hands over the same graphs as to `torch.compile(model, backend="loka")`, so `apply_mods` and
the Mods of the backend then leave the same biases alone and give norms the same blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import Tensor
from torch import fx
from torch import nn

from loka_compile import _compat
from loka_compile import module_order
from loka_compile import names
from loka_compile.options import Options
from loka_compile.passes import graph as g
from loka_compile.passes import norm_blocks
from loka_compile.passes.manager import PassContext
from loka_compile.passes.manager import run_passes
from loka_compile.passes.registry import PREPARE


@dataclass(frozen=True)
class Flow:
    """Linears that are heads: at most 16 outputs, which reach an output of the graph through no
    other linear and no norm. Norms that ran, and whether a linear feeds them."""

    heads: set[str] = field(default_factory=set)
    norms: dict[str, bool] = field(default_factory=dict)


def flow_of(model: nn.Module, example_inputs: Sequence[Any] | Mapping[str, Any]) -> Flow:
    """Names of `model`'s modules by what they do in a forward.

    example_inputs: positional arguments, or keyword arguments as a mapping; a batch of two rows
    will do. The forward runs once on a copy that shares the parameters, so buffers, gradients and
    random states stay as they are. Raises what the forward raises.
    """
    by_weight = {id(m.weight): n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    norms = {n: m for n, m in model.named_modules() if module_order.is_norm(m)}
    by_gain = {id(m.weight): n for n, m in norms.items() if m.weight is not None}
    found = Flow()

    def look(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        real = _compat.real_inputs(gm, inputs)
        mine, _ = run_passes(list(PREPARE), g.own_copy(gm), PassContext(Options()))
        held = {n.name: t for n, t in zip(_placeholders(mine), real, strict=False)}
        for site in names.find_sites(mine, real):
            name = by_weight.get(id(held.get(site.weight)))
            if site.head and name is not None:
                found.heads.add(name)
        for node, fed in norm_blocks.norms(mine):
            gain = g.parameter_of(node.args[2])
            name = by_gain.get(id(held.get(gain.name))) if gain is not None else None
            name = name or g.layer_of(node)
            if name in norms:
                found.norms[name] = fed
        return gm.forward

    _run_once(model, look, example_inputs)
    return found


def _placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def _run_once(model: nn.Module, backend: Any, inputs: Sequence[Any] | Mapping[str, Any]) -> None:
    own = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    compiled = torch.compile(own, backend=backend, dynamic=False)
    with torch.random.fork_rng(sorted(devices)), torch.no_grad():
        if isinstance(inputs, Mapping):
            compiled(**inputs)
        elif isinstance(inputs, Tensor):
            compiled(inputs)
        else:
            compiled(*inputs)
