"""DLRM (arXiv 1906.00091): inner products of all pairs of embeddings, then an MLP.

As published: ReLU, biases everywhere, no norms. The width of the products, n (n + 1) / 2 + d with n
embeddings and the dense features as one more, is rarely a multiple of 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from loka_compile.zoo.layers import MLP
from loka_compile.zoo.layers import PairwiseDots
from loka_compile.zoo.recommender import Recommender
from loka_compile.zoo.recommender import pick


@dataclass(frozen=True)
class DLRMConfig:
    d: int  # embedding width
    bottom: tuple[int, ...]  # hidden widths of the dense features' MLP, before the last of width d
    top: tuple[int, ...]  # hidden widths of the MLP over the products

    @classmethod
    def of(cls, scale: str) -> DLRMConfig:
        return pick(SCALES, scale)


SCALES = {
    "tiny": DLRMConfig(16, bottom=(256,), top=(256, 256)),
    "small": DLRMConfig(64, bottom=(512, 256), top=(1024, 1024, 512)),
    "base": DLRMConfig(128, bottom=(1024, 512), top=(4096, 4096, 2048)),
    "terabyte": DLRMConfig(128, bottom=(512, 256), top=(1024, 1024, 512, 256)),
}


class DLRMDense(nn.Module):
    """The part to compile: embeddings ``[B, n, d]``, dense float ``[B, F]`` -> logits ``[B]``."""

    def __init__(self, cfg: DLRMConfig, n_embeddings: int, n_dense: int) -> None:
        super().__init__()
        self.cfg = cfg
        # The bottom MLP's last layer is activated too.
        self.bottom = MLP(n_dense, (*cfg.bottom, cfg.d), style="relu") if n_dense else None
        self.dots = PairwiseDots(n_embeddings + (1 if n_dense else 0))
        self.top = MLP(self.dots.outputs + (cfg.d if n_dense else 0), cfg.top, 1, "relu")

    def forward(self, embeddings: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        if self.bottom is None:
            return self.top(self.dots(embeddings)).squeeze(-1)
        low = self.bottom(dense).to(embeddings.dtype)
        dots = self.dots(torch.cat([low.unsqueeze(1), embeddings], dim=1))
        return self.top(torch.cat([low, dots.to(low.dtype)], dim=1)).squeeze(-1)


class DLRM(Recommender):
    """Ids, dense -> logits ``[B]``."""

    scales = SCALES
    dense_type = DLRMDense
    about = "inner products of all pairs, then an MLP (1906.00091)"
