"""DHEN (arXiv 2203.11014): layers of ensembles of interaction modules.

Layer: ``X' = LayerNorm(sum_i module_i(X) + shortcut(X))`` over ``X [B, n, d]``. Modules: ``dlrm``
(products of pairs, MLP), ``dcn`` (low-rank cross), ``linear`` (over the features), ``attention``,
``fmb`` (Wukong's factorisation machine). ``production`` works on flat rows instead, as a public
kernel-tuning study found it in service: ``SwishLayerNorm(P x + sum_i softmax(w)_i P_i m_i(x))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from loka_compile.zoo.layers import MLP
from loka_compile.zoo.layers import CrossNet
from loka_compile.zoo.layers import DenseTokens
from loka_compile.zoo.layers import LinearCompression
from loka_compile.zoo.layers import PairwiseDots
from loka_compile.zoo.layers import SwishLayerNorm
from loka_compile.zoo.recommender import Recommender
from loka_compile.zoo.recommender import pick
from loka_compile.zoo.wukong import FactorizationMachineBlock


@dataclass(frozen=True)
class DHENConfig:
    d: int  # embedding width
    layers: int
    m: int  # embeddings out of each layer; of a flat layer: features / d
    hidden: tuple[int, ...]  # hidden widths of the dlrm module's and the fmb module's MLP
    rank: int  # of the dcn module
    head: tuple[int, ...]
    modules: tuple[str, ...] = ("dlrm", "dcn", "linear", "attention")
    heads: int = 2  # of the attention module
    k: int = 8  # rank of the fmb module
    flat: bool = False
    dense_hidden: tuple[int, ...] = (256,)

    @classmethod
    def of(cls, scale: str) -> DHENConfig:
        return pick(SCALES, scale)


SCALES = {
    "tiny": DHENConfig(16, 2, 16, hidden=(256,), rank=64, head=(256,)),
    "small": DHENConfig(64, 3, 32, hidden=(1024,), rank=256, head=(1024, 256), heads=4),
    "base": DHENConfig(
        128, 3, 64, hidden=(2048, 2048), rank=1024, head=(2048, 512), heads=4, dense_hidden=(1024,)
    ),
    # 129 embeddings of width 64 (128 fields and the dense features): 8256 -> 2048 -> 2048.
    "production": DHENConfig(64, 2, 32, hidden=(2048, 1024), rank=0, head=(512,), flat=True),
}


class DotProducts(nn.Module):
    """``[B, n, d]`` -> ``[B, m, d]``: products of all pairs, MLP."""

    def __init__(self, n: int, m: int, d: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.m, self.d = m, d
        self.dots = PairwiseDots(n)
        self.mlp = MLP(self.dots.outputs, hidden, m * d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.dots(x)).view(-1, self.m, self.d)


class FlatCross(nn.Module):
    """``[B, n, d]`` -> ``[B, m, d]``: one low-rank cross layer over the flat row, projected."""

    def __init__(self, n: int, m: int, d: int, rank: int) -> None:
        super().__init__()
        self.m, self.d = m, d
        self.cross = CrossNet(n * d, 1, rank)
        self.projection = nn.Linear(n * d, m * d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection(self.cross(x.flatten(1))).view(-1, self.m, self.d)


class SelfAttention(nn.Module):
    """``[B, n, d]`` -> ``[B, m, d]``: the embeddings attend to each other, then compression."""

    def __init__(self, n: int, m: int, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)
        self.compress = LinearCompression(n, m)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        return self.compress(self.out(y))


def interaction(name: str, n: int, m: int, cfg: DHENConfig) -> nn.Module:
    """The module called ``name``, ``[B, n, d]`` -> ``[B, m, d]``."""
    if name == "dlrm":
        return DotProducts(n, m, cfg.d, cfg.hidden)
    if name == "dcn":
        return FlatCross(n, m, cfg.d, cfg.rank)
    if name == "linear":
        return LinearCompression(n, m)
    if name == "attention":
        return SelfAttention(n, m, cfg.d, cfg.heads)
    if name == "fmb":
        return FactorizationMachineBlock(n, m, cfg.d, cfg.k, cfg.hidden)
    raise ValueError(f"unknown module {name!r}; use dlrm, dcn, linear, attention or fmb")


class DHENLayer(nn.Module):
    """``[B, n, d]`` -> ``[B, m, d]``: sum of the modules and the shortcut, normalised."""

    def __init__(self, n: int, m: int, cfg: DHENConfig) -> None:
        super().__init__()
        self.interactions = nn.ModuleDict({x: interaction(x, n, m, cfg) for x in cfg.modules})
        self.shortcut = LinearCompression(n, m) if n != m else nn.Identity()
        self.norm = nn.LayerNorm(cfg.d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [module(x) for module in self.interactions.values()]
        # The first module's rows are contiguous, the shortcut's are not: the sum takes after the
        # first addend.
        return self.norm(sum(made[1:], made[0]) + self.shortcut(x))


class FlatLayer(nn.Module):
    """``[B, n d]`` -> ``[B, m d]``: the layer found in production, on flat rows.

    Its dot products and its cross layer (DCN's first form, one weight vector) have no GEMM of their
    own; they and the MLP are projected and added with softmax weights.
    """

    def __init__(self, n: int, m: int, cfg: DHENConfig) -> None:
        super().__init__()
        self.n, self.d = n, cfg.d
        width, out = n * cfg.d, m * cfg.d
        self.input_projection = nn.Linear(width, out)
        self.dots = PairwiseDots(n)
        self.cross_weight = nn.Parameter(torch.randn(width) / width**0.5)
        self.cross_bias = nn.Parameter(torch.zeros(width))
        self.mlp = MLP(width, cfg.hidden)
        sizes = (self.dots.outputs, width, cfg.hidden[-1])
        self.projections = nn.ModuleList(nn.Linear(size, out) for size in sizes)
        self.mix = nn.Parameter(torch.zeros(3))
        self.act = SwishLayerNorm(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        along = (x * self.cross_weight).sum(-1, keepdim=True)
        crossed = x * along + self.cross_bias + x
        made = (self.dots(x.view(-1, self.n, self.d)), crossed, self.mlp(x))
        weights = torch.softmax(self.mix, 0)
        total = self.input_projection(x)
        for i, projection in enumerate(self.projections):
            total = total + weights[i] * projection(made[i])
        return self.act(total)


class DHENDense(nn.Module):
    """The part to compile: embeddings ``[B, n, d]``, dense float ``[B, F]`` -> logits ``[B]``."""

    def __init__(self, cfg: DHENConfig, n_embeddings: int, n_dense: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.tokens = DenseTokens(n_dense, cfg.d, 1, cfg.dense_hidden)
        n = n_embeddings + self.tokens.tokens
        layers: list[nn.Module] = []
        for _ in range(cfg.layers):
            layers.append((FlatLayer if cfg.flat else DHENLayer)(n, cfg.m, cfg))
            n = cfg.m
        self.layers = nn.Sequential(*layers)
        self.head = MLP(n * cfg.d, cfg.head, 1)

    def forward(self, embeddings: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        x = self.tokens(embeddings, dense)
        if self.cfg.flat:
            return self.head(self.layers(x.flatten(1))).squeeze(-1)
        return self.head(self.layers(x).flatten(1)).squeeze(-1)


class DHEN(Recommender):
    """Ids, dense -> logits ``[B]``."""

    scales = SCALES
    dense_type = DHENDense
    about = "layers of ensembles of interaction modules (2203.11014)"
