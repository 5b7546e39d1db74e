"""The variants of linear, norm and activation: models written once, run plain or after the Mods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from chain_models import EPS32
from chain_models import K
from chain_models import N
from chain_models import perturb
from torch import Tensor
from torch import nn

from loka_compile.kernels.block_norm import block_norm_ref
from loka_compile.kernels.block_norm import block_of


@dataclass
class Ops:
    """What a variant is written with: the model's own layers, or these layers after the Mods."""

    layers: nn.ModuleDict
    modded: bool

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.layers[name].weight) if self.modded else self.layers[name](x)

    def norm(self, name: str, x: Tensor) -> Tensor:
        norm = self.layers[name]
        if not self.modded:
            return norm(x)
        features = x.shape[-1]
        block = block_of(features)
        if isinstance(norm, nn.GroupNorm):
            block = features // norm.num_groups
        eps = EPS32 if norm.eps is None else norm.eps
        return block_norm_ref(x, getattr(norm, "weight", None), block, eps)

    def silu(self, x: Tensor) -> Tensor:
        return F.hardswish(x) if self.modded else F.silu(x)

    def gate(self, x: Tensor) -> Tensor:
        """The sigmoid of v * sigmoid(norm(v))."""
        return F.hardsigmoid(x) if self.modded else torch.sigmoid(x)


class Variant(nn.Module):
    def __init__(self, how: Callable[[Ops, Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.layers = perturb(nn.ModuleDict(layers))
        self.how = how

    def forward(self, x: Tensor) -> Any:
        return self.how(Ops(self.layers, False), x)


def reference(model: Variant, x: Tensor) -> Any:
    return model.how(Ops(model.layers, True), x)


def linear(features: int = N, into: int = K, **options: Any) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(into, features, **options)
