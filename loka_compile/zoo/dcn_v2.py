"""DCN-V2 (arXiv 2008.13535): cross layers over all features, and a deep tower.

As published: ReLU, biases everywhere, no norms. Full rank or low rank; the tower beside the cross
net (parallel) or on top of it (stacked, as the MLPerf recommender has it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from loka_compile.zoo.layers import MLP
from loka_compile.zoo.layers import CrossNet
from loka_compile.zoo.layers import DenseTokens
from loka_compile.zoo.recommender import Recommender
from loka_compile.zoo.recommender import pick


@dataclass(frozen=True)
class DCNv2Config:
    d: int  # embedding width
    cross: int  # cross layers
    rank: int | None  # of the cross layers' W; None: full
    deep: tuple[int, ...]  # hidden widths of the tower
    bottom: tuple[int, ...]  # hidden widths of the dense features' MLP
    stacked: bool = False

    @classmethod
    def of(cls, scale: str) -> DCNv2Config:
        return pick(SCALES, scale)


SCALES = {
    "tiny": DCNv2Config(16, 2, None, deep=(256, 256), bottom=(256,)),
    "tiny-lowrank": DCNv2Config(16, 3, 128, deep=(256, 256), bottom=(256,), stacked=True),
    "small": DCNv2Config(64, 3, 512, deep=(1024, 1024, 512), bottom=(512,)),
    "base": DCNv2Config(128, 3, 2048, deep=(4096, 2048, 1024), bottom=(1024,), stacked=True),
    # The default of a common research library: widths that are no multiple of 16.
    "research": DCNv2Config(40, 3, None, deep=(500, 500, 500), bottom=(500,)),
    # 26 tables of width 128 and 13 dense features: D = 27 * 128 = 3456.
    "mlperf": DCNv2Config(
        128, 3, 512, deep=(1024, 1024, 512, 256), bottom=(512, 256), stacked=True
    ),
}


class DCNv2Dense(nn.Module):
    """The part to compile: embeddings ``[B, n, d]``, dense float ``[B, F]`` -> logits ``[B]``."""

    def __init__(self, cfg: DCNv2Config, n_embeddings: int, n_dense: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.tokens = DenseTokens(n_dense, cfg.d, 1, cfg.bottom, "relu")
        width = (n_embeddings + self.tokens.tokens) * cfg.d
        self.cross = CrossNet(width, cfg.cross, cfg.rank)
        self.deep = MLP(width, cfg.deep, style="relu")
        self.head = nn.Linear(cfg.deep[-1] if cfg.stacked else width + cfg.deep[-1], 1)

    def forward(self, embeddings: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        x = self.tokens(embeddings, dense).flatten(1)
        crossed = self.cross(x)
        if self.cfg.stacked:
            return self.head(self.deep(crossed)).squeeze(-1)
        return self.head(torch.cat([crossed, self.deep(x)], dim=1)).squeeze(-1)


class DCNv2(Recommender):
    """Ids, dense -> logits ``[B]``."""

    scales = SCALES
    dense_type = DCNv2Dense
    about = "cross layers and a deep tower (2008.13535)"
