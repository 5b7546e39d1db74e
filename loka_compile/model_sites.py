"""The GEMM sites of a model and what their prices hang on, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch import fx
from torch import nn

from loka_compile import _compat
from loka_compile import keeping
from loka_compile import variant
from loka_compile.capture import capture
from loka_compile.eligibility import shape_of
from loka_compile.lowering.parts import Place
from loka_compile.mod_set import by_mod
from loka_compile.names import Site
from loka_compile.options import Options
from loka_compile.passes.neighbours import Chain
from loka_compile.zoo.registry import MODELS

#: Categorical and dense columns of a made-up input, and the length of its histories.
COLUMNS, DENSE, HISTORY = 26, 13, 16


@dataclass(frozen=True)
class Found:
    """producer: name of the site whose fused output this one reads, if nobody else does. fused: its
    chain's id. bounded: the value that it reads, if that is the result of a norm on its own."""

    site: Site
    weight: Tensor
    place: Place
    producer: str | None
    fused: str | None
    #: Why it is better off in high precision, see `neighbours.Chain`.
    stays: str = ""
    bounded: str | None = None


@dataclass(frozen=True)
class Seen:
    """blocks: norm -> the width of its blocks where the Mods are on. kept: as in a plan."""

    found: list[Found]
    blocks: dict[str, int]
    kept: dict[str, tuple[str, ...]]


def zoo_model(text: str, device: torch.device | str = "meta") -> tuple[nn.Module, Any]:
    """`NAME[:SCALE]` -> (the dense part on `device`, rows -> made-up inputs there).

    Wukong gets as many embeddings as its layers keep. Raises ValueError with the known names.
    """
    from loka_compile.zoo.recommender import History
    from loka_compile.zoo.recommender import pick

    name, _, scale = text.partition(":")
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; use one of {', '.join(MODELS)}")
    kind = MODELS[name]
    cfg: Any = pick(kind.scales, scale or "base")
    columns, dense = COLUMNS, DENSE
    if name == "wukong":
        columns, dense = cfg.n_fmb + cfg.n_lcb, 0
    history = History(0, HISTORY) if kind.uses_history else None
    with torch.device(device):
        whole = kind(cfg, [2] * columns, dense, sparse=False, history=history)

    def inputs(rows: int) -> tuple[Tensor, ...]:
        return whole.example_inputs(rows, device=device)

    return whole.dense, inputs


def places_of(
    model: nn.Module, inputs: Sequence[Tensor], device: torch.device, options: Options | None = None
) -> list[Found]:
    """Every site of a training step of `model` but its heads, as if on `device`; with the Mods that
    the options name, all of them by default.

    `model` and `inputs` may be on the meta device: nothing is computed.
    """
    return look_at(model, inputs, device, options).found


def look_at(
    model: nn.Module, inputs: Sequence[Tensor], device: torch.device, options: Options | None = None
) -> Seen:
    """The same, and the norms."""
    chosen = options or Options(mods="on")
    found: list[Found] = []
    blocks: dict[str, int] = {}
    kept: set[tuple[str, str]] = set()

    def look(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        real = _compat.real_inputs(gm, example_inputs)
        source = capture(gm, real, chosen)
        blocks.update(source.blocks)
        # As the runtime does it: what observes is neither batched nor handed over.
        observed = frozenset(s.name for s in source.sites)
        layers = keeping.layers(source, source.weights_of(real))
        mods = keeping.wanted(layers, chosen)
        kept.update(keeping.from_the_root(mods, layers).kept)
        rewritten = variant.rewrite(source, variant.Decided(mods, (), observed), chosen)
        for site in source.sites:
            chain = rewritten.chains.get(site.name, Chain())
            layout = "kn" if site.transposed else "nk"
            shape = replace(shape_of(site), epilogue=chain.epilogue)
            place = Place(shape, site.dtype, device, layout, chain.epilogue)
            if site.weight and not site.refusal and not site.head:
                weight = real[source.positions[site.weight]]
                fused = rewritten.fused.get(site.name)
                one = Found(site, weight, place, chain.producer, fused, chain.stays, chain.bounded)
                found.append(one)
        return gm

    # What is compiled already stays; a limit that it used up must not make us see nothing.
    limits: dict[str, Any] = {"recompile_limit": 1024, "accumulated_recompile_limit": 8192}
    with torch.enable_grad(), torch._dynamo.config.patch(limits):
        torch.compile(model, backend=look, dynamic=False)(*inputs)
    return Seen(found, blocks, by_mod(kept))
