"""Heads, and norms that a linear feeds, told from modules alone."""

from __future__ import annotations

import pytest
from torch import nn

from loka_compile.module_order import heads
from loka_compile.module_order import norms_behind_no_linear
from loka_compile.zoo import MODELS
from loka_compile.zoo import History
from loka_compile.zoo.layers import SwishLayerNorm


class Block(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        for i, part in enumerate(parts):
            self.add_module(f"p{i}", part)


@pytest.mark.parametrize(
    ("model", "alone"),
    [
        (nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4)), set()),
        (nn.Sequential(nn.Linear(8, 4), nn.Dropout(), nn.SiLU(), nn.RMSNorm(4)), set()),
        (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)), {"0"}),
        (nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.SiLU(), nn.LayerNorm(4)), {"3"}),
        (nn.Sequential(nn.Linear(8, 4), SwishLayerNorm(4)), set()),
        (nn.Sequential(nn.Embedding(8, 4), nn.LayerNorm(4)), {"1"}),
        # A block with linears of its own reads its input first.
        (nn.Sequential(nn.Linear(8, 4), Block(nn.LayerNorm(4), nn.Linear(4, 4))), {"1.p0"}),
        (Block(nn.Linear(8, 4), nn.LayerNorm(4)), set()),
        (nn.LayerNorm(4), {""}),
    ],
)
def test_by_hand(model: nn.Module, alone: set[str]) -> None:
    assert norms_behind_no_linear(model) == alone


@pytest.mark.parametrize("name", sorted(MODELS))
def test_of_the_zoo_only_the_factorisation_machines_norm_is_alone(name: str) -> None:
    kind = MODELS[name]
    dense = kind(kind.scales["tiny"], [2] * 6, 3, history=History(0, 5)).dense
    alone = norms_behind_no_linear(dense)
    assert all(path.endswith("fmb.norm") for path in alone)
    assert bool(alone) == (name in ("wukong", "elfm"))


def tower(inputs: int, *widths: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for width in widths:
        parts += [nn.Linear(inputs, width), nn.LayerNorm(width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*parts[:-2])


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (tower(32, 64, 1), {"3"}),
        (tower(32, 64, 17), set()),
        # Two tasks over one bottom, each with its own tower; then one with two towers only.
        (Block(tower(32, 64), tower(64, 32, 1), tower(64, 32, 16)), {"p1.3", "p2.3"}),
        (nn.ModuleDict({"a": tower(64, 32, 1), "b": tower(64, 48, 1)}), {"a.3", "b.3"}),
        # A bottleneck in front of a tower, and DLRM's narrow bottom: not beside, but below.
        (Block(tower(32, 64, 16), tower(16, 32, 1)), {"p1.3"}),
        (Block(tower(13, 64, 16), tower(367, 64, 1)), {"p1.3"}),
        # Narrow linears amidst wide ones, as of a gate or an attention of narrow heads.
        (Block(nn.Linear(64, 8), nn.Linear(64, 64), nn.Linear(64, 1)), {"p2"}),
        (Block(nn.Linear(64, 64), nn.Linear(64, 1), nn.Linear(64, 1)), {"p1", "p2"}),
        (nn.Sequential(nn.Linear(64, 4), nn.LayerNorm(4)), set()),
    ],
)
def test_heads_by_hand(model: nn.Module, found: set[str]) -> None:
    assert heads(model) == found
