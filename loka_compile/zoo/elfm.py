"""An ELFM-like model: our own composition, since no architecture of ELFM (2502.17494) is public.

It joins what the paper says such a model consists of: a SUM-like user tower (2311.09544; a pyramid
with residuals that makes two user embeddings), layers whose ensemble holds a factorisation machine,
a low-rank DCN, DLRM's products and a linear map, and two heads (the label, and the auxiliary one
that external distillation trains on a teacher's label; without a teacher both see the label).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from loka_compile.zoo.dhen import DHENConfig
from loka_compile.zoo.dhen import DHENLayer
from loka_compile.zoo.layers import MLP
from loka_compile.zoo.layers import DenseTokens
from loka_compile.zoo.recommender import Recommender
from loka_compile.zoo.recommender import pick


@dataclass(frozen=True)
class ELFMConfig:
    d: int  # embedding width
    layers: int
    m: int  # embeddings out of each layer
    hidden: tuple[int, ...]  # of the modules' MLPs
    rank: int  # of the dcn module
    k: int  # rank of the fmb module
    user_hidden: int  # width of the user tower's MLPs
    head: tuple[int, ...]
    dense_tokens: int = 4
    dense_hidden: tuple[int, ...] = (256,)

    @classmethod
    def of(cls, scale: str) -> ELFMConfig:
        return pick(SCALES, scale)


SCALES = {
    "tiny": ELFMConfig(16, 2, 16, hidden=(256,), rank=64, k=8, user_hidden=256, head=(256,)),
    "small": ELFMConfig(
        64, 3, 32, hidden=(1024,), rank=256, k=24, user_hidden=512, head=(1024, 256)
    ),
    "base": ELFMConfig(
        128,
        4,
        64,
        hidden=(2048, 2048),
        rank=1024,
        k=32,
        user_hidden=1024,
        head=(2048, 512),
        dense_hidden=(1024,),
    ),
}


class PyramidLayer(nn.Module):
    """``[B, n, d]`` -> ``[B, m, d]``, m < n: MLP and a linear residual over the flat row."""

    def __init__(self, n: int, m: int, d: int, hidden: int) -> None:
        super().__init__()
        self.m, self.d = m, d
        self.mlp = MLP(n * d, (hidden,), m * d)
        self.residual = nn.Linear(n * d, m * d)
        self.norm = nn.LayerNorm(d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        return self.norm((self.mlp(flat) + self.residual(flat)).view(-1, self.m, self.d))


class UserTower(nn.Sequential):
    """``[B, n, d]`` -> ``[B, 2, d]``: halves the number of embeddings down to two."""

    def __init__(self, n: int, d: int, hidden: int) -> None:
        layers = []
        while n > 2:
            m = max(2, n // 2)
            layers.append(PyramidLayer(n, m, d, hidden))
            n = m
        super().__init__(*layers)
        self.outputs = n


class ELFMDense(nn.Module):
    """The part to compile: embeddings ``[B, n, d]``, dense ``[B, F]`` -> logits ``[B, 2]``.

    The second half of the fields counts as the user's: in most logs they stand together, and the
    composition does not hang on it.
    """

    def __init__(self, cfg: ELFMConfig, n_embeddings: int, n_dense: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.tokens = DenseTokens(n_dense, cfg.d, cfg.dense_tokens, cfg.dense_hidden)
        self.n_user = n_embeddings // 2
        self.user_tower = UserTower(self.n_user, cfg.d, cfg.user_hidden)
        n = n_embeddings - self.n_user + self.user_tower.outputs + self.tokens.tokens
        ensemble = DHENConfig(
            cfg.d,
            cfg.layers,
            cfg.m,
            cfg.hidden,
            cfg.rank,
            head=(),
            modules=("fmb", "dcn", "dlrm", "linear"),
            k=cfg.k,
        )
        layers = []
        for _ in range(cfg.layers):
            layers.append(DHENLayer(n, cfg.m, ensemble))
            n = cfg.m
        self.layers = nn.Sequential(*layers)
        self.top = MLP(n * cfg.d, cfg.head)
        self.label_head = nn.Linear(cfg.head[-1], 1)
        self.teacher_head = nn.Linear(cfg.head[-1], 1)

    def forward(self, embeddings: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        n = embeddings.shape[1] - self.n_user
        user = self.user_tower(embeddings[:, n:])
        x = self.tokens(torch.cat([embeddings[:, :n], user.to(embeddings.dtype)], dim=1), dense)
        top = self.top(self.layers(x).flatten(1))
        return torch.cat([self.label_head(top), self.teacher_head(top)], dim=1)


class ELFM(Recommender):
    """Ids, dense -> logits ``[B, 2]``: label, teacher."""

    scales = SCALES
    dense_type = ELFMDense
    about = "SUM-like user tower, DLRM, DCN, FMB, two heads: our own composition"
