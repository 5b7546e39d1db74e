"""Wukong (arXiv 2403.02545): stacked factorisation machines and linear compression.

Layer: ``X' = LayerNorm(concat(FMB(X), LCB(X)) + R(X))`` over ``X`` ``[B, n, d]``. The MLPs are
Linear -> LayerNorm -> SiLU, as production models have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from loka_compile.zoo.layers import MLP
from loka_compile.zoo.layers import LinearCompression
from loka_compile.zoo.recommender import Recommender
from loka_compile.zoo.recommender import pick


@dataclass(frozen=True)
class WukongConfig:
    """Sizes, in the paper's letters where it has one."""

    d: int  # embedding width
    layers: int  # l
    n_lcb: int  # nL: embeddings from linear compression
    n_fmb: int  # nF: embeddings from the factorisation machine block
    k: int  # rank of the factorisation machine
    mlp: tuple[int, ...]  # hidden widths of each FMB's MLP
    head: tuple[int, ...]  # hidden widths of the head
    dense_tokens: int = 4  # embeddings made from the dense features
    dense_hidden: tuple[int, ...] = (256,)
    style: str = "norm_silu"  # of the MLPs

    @classmethod
    def of(cls, scale: str) -> WukongConfig:
        """``tiny`` (2 CPU cores), ``small`` (one GPU), ``base`` (one H200), or of the ladder."""
        return pick(SCALES, scale)


#: The ladder published with the model: d = 160, 720 features. Ours have no dense features, and the
#: head's width is ours. name -> (sizes, GFLOP per example in training, dense parameters in 1e9).
LADDER = {
    f"ladder-{gflop}": (
        WukongConfig(160, layers, n, n, k, mlp=(h,) * 3, head=(512,)),
        gflop,
        billions,
    )
    for layers, n, k, h, gflop, billions in (
        (2, 8, 24, 2048, 0.53, 0.74),
        (4, 32, 24, 2048, 1.25, 0.82),
        (8, 32, 24, 2048, 2.12, 0.95),
        (8, 48, 48, 4096, 5.6, 1.46),
        (8, 96, 96, 8192, 22.2, 3.96),
        (8, 96, 96, 16384, 61, 10.0),
        (8, 192, 192, 16384, 108, 17.0),
    )
}
LADDER_FEATURES = 720

SCALES = {
    "tiny": WukongConfig(16, 2, 16, 16, 8, mlp=(256, 256), head=(256, 256)),
    "small": WukongConfig(
        64, 4, 32, 32, 24, mlp=(1024, 1024), head=(1024, 256), dense_hidden=(512,)
    ),
    "base": WukongConfig(
        128, 4, 64, 64, 32, mlp=(2048, 2048, 2048), head=(2048, 512), dense_hidden=(1024,)
    ),
    # Deeper and wider where it hurts: what low precision is tried on with raw counts as input.
    "stress": WukongConfig(16, 4, 16, 16, 8, mlp=(256,) * 3, head=(256, 256)),
    "stress-no-norm": WukongConfig(16, 4, 16, 16, 8, mlp=(256,) * 3, head=(256, 256), style="silu"),
    # Its dense tokens come out of linears that are wide enough for FP8, and no norm tames them.
    "stress-wide": WukongConfig(
        *(16, 4, 16, 16, 8),
        mlp=(256,) * 3,
        head=(256, 256),
        dense_tokens=16,
        dense_hidden=(256, 256),
        style="silu",
    ),
    **{name: sizes for name, (sizes, _, _) in LADDER.items()},
}


class FactorizationMachineBlock(nn.Module):
    """``[B, n, d]`` -> ``[B, m, d]`` : products of rank ``k``, X (X^T Y), then an MLP."""

    def __init__(
        self,
        n: int,
        m: int,
        d: int,
        k: int,
        hidden: Sequence[int],
        style: str = "norm_silu",
    ) -> None:
        super().__init__()
        self.m, self.d = m, d
        self.projection = nn.Parameter(torch.empty(n, k))
        nn.init.kaiming_uniform_(self.projection.T, a=5**0.5)
        self.norm = nn.LayerNorm(n * k)
        self.mlp = MLP(n * k, hidden, m * d, style)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        products = torch.bmm(x, x.permute(0, 2, 1) @ self.projection)
        return self.mlp(self.norm(products.flatten(1))).view(-1, self.m, self.d)


class WukongLayer(nn.Module):
    """``[B, n, d]`` -> ``[B, nF + nL, d]``."""

    def __init__(self, n: int, cfg: WukongConfig) -> None:
        super().__init__()
        out = cfg.n_fmb + cfg.n_lcb
        self.fmb = FactorizationMachineBlock(n, cfg.n_fmb, cfg.d, cfg.k, cfg.mlp, cfg.style)
        self.lcb = LinearCompression(n, cfg.n_lcb)
        self.residual = LinearCompression(n, out) if n != out else nn.Identity()
        self.norm = nn.LayerNorm(cfg.d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.fmb(x), self.lcb(x)], dim=1)
        return self.norm(both + self.residual(x))


class WukongDense(nn.Module):
    """The part to compile: embeddings ``[B, n, d]``, dense float ``[B, F]`` -> logits ``[B]``.

    The dense features become ``cfg.dense_tokens`` more embeddings of width d.
    """

    def __init__(self, cfg: WukongConfig, n_embeddings: int, n_dense: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.dense_mlp = (
            MLP(n_dense, cfg.dense_hidden, cfg.dense_tokens * cfg.d, cfg.style) if n_dense else None
        )
        n = n_embeddings + (cfg.dense_tokens if n_dense else 0)
        layers = []
        for _ in range(cfg.layers):
            layers.append(WukongLayer(n, cfg))
            n = cfg.n_fmb + cfg.n_lcb
        self.layers = nn.Sequential(*layers)
        self.head = MLP(n * cfg.d, cfg.head, 1, cfg.style)

    def forward(self, embeddings: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        x = embeddings
        if self.dense_mlp is not None:
            tokens = self.dense_mlp(dense).view(-1, self.cfg.dense_tokens, self.cfg.d)
            # Under autocast the tokens are bf16 while the looked-up rows are fp32.
            x = torch.cat([x, tokens.to(x.dtype)], dim=1)
        return self.head(self.layers(x).flatten(1)).squeeze(-1)


class Wukong(Recommender):
    """Ids, dense -> logits ``[B]``."""

    scales = SCALES
    dense_type = WukongDense
    about = "stacked factorisation machines and linear compression (2403.02545)"

    dense: WukongDense
