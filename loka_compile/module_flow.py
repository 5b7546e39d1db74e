"""Heads of a model as the backend would see them, told from one traced run on example inputs.

Dynamo hands over the same graphs as to `torch.compile(model, backend="loka")`, so `apply_mods` and
the Mods of the backend then leave the same biases alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import fx
from torch import nn

from loka_compile import _compat
from loka_compile import names
from loka_compile.options import Options
from loka_compile.passes import graph as g
from loka_compile.passes.manager import PassContext
from loka_compile.passes.manager import run_passes
from loka_compile.passes.registry import PREPARE


def heads_of(model: nn.Module, example_inputs: Sequence[Any] | Mapping[str, Any]) -> set[str]:
    """Names of the Linears that are heads: at most 16 outputs, which reach an output of the graph
    through no other linear and no norm.

    example_inputs: positional arguments, or keyword arguments as a mapping; a batch of two rows
    will do. The forward runs once on a copy that shares the parameters, so buffers, gradients and
    random states stay as they are. Raises what the forward raises.
    """
    by_weight = {id(m.weight): n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    found: set[str] = set()

    def look(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        real = _compat.real_inputs(gm, inputs)
        mine, _ = run_passes(list(PREPARE), g.own_copy(gm), PassContext(Options()))
        positions = [n.name for n in mine.graph.nodes if n.op == "placeholder"]
        for site in names.find_sites(mine, real):
            if site.head and site.weight:
                name = by_weight.get(id(real[positions.index(site.weight)]))
                if name is not None:
                    found.add(name)
        return gm.forward

    _run_once(model, look, example_inputs)
    return found


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
