"""Step 1 to 3 of the pipeline: a private, canonical, named copy of what Dynamo handed over."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import fx
from torch._guards import detect_fake_mode

from loka_compile import _compat
from loka_compile import names
from loka_compile.kernels.block_norm import block_of
from loka_compile.mods import Judged
from loka_compile.options import Options
from loka_compile.passes import graph as g
from loka_compile.passes import mod_layers
from loka_compile.passes import norm_blocks
from loka_compile.passes.manager import PassContext
from loka_compile.passes.manager import run_passes
from loka_compile.passes.matching import transformed
from loka_compile.passes.records import PassRecord
from loka_compile.passes.registry import PREPARE
from loka_compile.plan import Plan


@dataclass(frozen=True)
class JudgedInput:
    """A graph input that tells a fresh model from a trained one (see `mods.Judged`)."""

    position: int
    name: str
    role: str
    fan_in: int


@dataclass(frozen=True)
class Source:
    """One Dynamo graph, canonical and named, with what a later compile of it needs."""

    gm: fx.GraphModule
    #: The graph as Dynamo made it (a copy), for `fall back to plain Inductor`.
    original: fx.GraphModule
    #: Placeholder values as fakes: they carry the symbols, and keep no batch alive.
    fakes: list[Any]
    fake_mode: Any
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    grad_enabled: bool
    #: Grad is enabled and some floating-point input requires it.
    training: bool
    device: torch.device
    sites: tuple[names.Site, ...]
    judged: tuple[JudgedInput, ...]
    #: weight placeholder name -> its position among the inputs.
    positions: dict[str, int]
    records: tuple[PassRecord, ...]
    #: Norm -> the width of its blocks where the Mods are on.
    blocks: dict[str, int]
    #: Mod -> layers that it may change.
    layers: dict[str, tuple[str, ...]]
    #: weight placeholder name -> its path from the root that is compiled.
    paths: dict[str, str]

    def weights(self) -> tuple[int, ...]:
        """Positions of the distinct site weights."""
        return tuple(dict.fromkeys(self.positions[s.weight] for s in self.sites if s.weight))

    def weights_of(self, args: Sequence[Any]) -> dict[str, Any]:
        """Site name -> its weight among the graph's inputs."""
        return {s.name: args[self.positions[s.weight]] for s in self.sites if s.weight}

    def judge(self, args: tuple[Any, ...]) -> list[Judged]:
        return [
            Judged(j.name, args[j.position], j.role, j.fan_in)
            for j in self.judged
            if isinstance(args[j.position], Tensor)
        ]

    def label(self) -> str:
        kind = "training" if self.training else ("grad enabled" if self.grad_enabled else "no grad")
        paths = [s.name for s in self.sites]
        shown = ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "")
        return f"{kind} graph of {len(paths)} linears ({shown})"


def capture(
    gm: fx.GraphModule, example_inputs: list[Any], options: Options, plan: Plan | None = None
) -> Source:
    original = g.own_copy(gm)
    mine = g.own_copy(gm)
    context = PassContext(options)
    mine, records = run_passes(list(PREPARE), mine, context)
    placeholders = [n for n in mine.graph.nodes if n.op == "placeholder"]
    fakes = [g.value(n) for n in placeholders]
    fake_mode = detect_fake_mode([f for f in fakes if isinstance(f, Tensor)])
    sites = names.find_sites(mine, example_inputs, options.heads)
    blocks = norm_blocks.decide(mine, block_rule(options, plan))
    grad = torch.is_grad_enabled()
    needs = any(isinstance(f, Tensor) and f.requires_grad for f in fakes)
    return Source(
        gm=mine,
        original=original,
        fakes=fakes,
        fake_mode=fake_mode,
        autocast=_compat.autocast_state(),
        grad_enabled=grad,
        training=grad and needs,
        device=_device(fakes),
        sites=tuple(sites),
        judged=tuple(_judged(mine, placeholders)),
        positions={n.name: i for i, n in enumerate(placeholders)},
        records=tuple(records),
        blocks=blocks,
        layers=mod_layers.layers(mine),
        paths={
            n.name: path
            for n in placeholders
            if (path := names.parameter_path(_compat.source_name(n))) and g.is_parameter(n)
        },
    )


def block_rule(options: Options, plan: Plan | None) -> Callable[[str, int, bool], int]:
    """(norm, features of a statistic, fed by a linear) -> block.

    The option's, else the plan's, else the default. Plans that name no blocks were made when every
    norm had those of its width.
    """

    def rule(name: str, width: int, fed: bool) -> int:
        if options.block is not None:
            return min(options.block, width)
        if plan is None:
            return block_of(width, fed)
        if plan.blocks is None:
            return block_of(width)
        return min(plan.blocks.get(name, block_of(width, fed)), width)

    return rule


def _device(fakes: list[Any]) -> torch.device:
    devices = [f.device for f in fakes if isinstance(f, Tensor)]
    accelerated = [d for d in devices if d.type != "cpu"]
    return (accelerated or devices or [torch.device("cpu")])[0]


def _judged(gm: fx.GraphModule, placeholders: list[fx.Node]) -> list[JudgedInput]:
    """Norm gains, norm biases and linear biases among the graph's parameters."""
    position = {n: i for i, n in enumerate(placeholders)}
    found: dict[int, JudgedInput] = {}

    def add(node: Any, role: str, fan_in: int, outer: dict[fx.Node, fx.Node]) -> None:
        source = g.parameter_of(node)
        top = outer.get(source) if source is not None else None
        if top is not None and g.is_parameter(top):
            name = names.parameter_path(_compat.source_name(top)) or top.name
            found.setdefault(position[top], JudgedInput(position[top], name, role, fan_in))

    for graph, outer in names.with_outer(gm):
        if transformed(graph):
            # Nothing in it is spelt as passes expect, and no Mod looks at it.
            continue
        for node in graph.graph.nodes:
            if g.is_call(node, names.LINEAR) and node.args[2] is not None:
                weight = g.value(node.args[1])
                add(node.args[2], "linear bias", int(weight.shape[1]), outer)
            elif g.is_call(node, torch.nn.functional.layer_norm, torch.nn.functional.group_norm):
                add(node.args[2], "gain", 0, outer)
                add(node.args[3], "norm bias", 0, outer)
            elif g.is_call(node, torch.rms_norm):
                add(node.args[2], "gain", 0, outer)
    return [found[i] for i in sorted(found)]
