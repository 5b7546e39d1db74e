"""InterFormer (arXiv 2411.09852): features and a behaviour sequence that learn from each other.

A layer holds three arches. Cross: summaries of the features (linear compression) and of the
sequence (its leading, pooled and latest tokens), each through a self gate. Interaction: features
with the sequence's summary, through a DHEN layer and an MLP. Sequence: a personalised feed-forward
(a d x d matrix made from the features' summary), then attention with rotary positions. There is no
official code; sizes follow the paper where it has them (4 leading, 2 pooled, 2 latest tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from loka_compile.zoo.dhen import DHENConfig
from loka_compile.zoo.dhen import DHENLayer
from loka_compile.zoo.layers import MLP
from loka_compile.zoo.layers import DenseTokens
from loka_compile.zoo.layers import LinearCompression
from loka_compile.zoo.recommender import Recommender
from loka_compile.zoo.recommender import pick


@dataclass(frozen=True)
class InterFormerConfig:
    d: int  # embedding width, a multiple of 2 * heads
    layers: int
    hidden: tuple[int, ...]  # of the interaction arch's MLPs
    rank: int  # of its cross module
    head: tuple[int, ...]
    heads: int = 2
    leading: int = 4  # tokens that summarise the features and lead the sequence (CLS)
    pooled: int = 2  # tokens pooled by learned queries (PMA)
    latest: int = 2  # the newest tokens
    dense_tokens: int = 4
    dense_hidden: tuple[int, ...] = (256,)

    @classmethod
    def of(cls, scale: str) -> InterFormerConfig:
        return pick(SCALES, scale)


SCALES = {
    "tiny": InterFormerConfig(16, 2, hidden=(256,), rank=64, head=(256,)),
    "small": InterFormerConfig(64, 3, hidden=(1024,), rank=256, head=(1024, 256), heads=4),
    "base": InterFormerConfig(
        128, 3, hidden=(2048,), rank=1024, head=(1024, 512), heads=4, dense_hidden=(1024,)
    ),
}


class SelfGate(nn.Module):
    """``x * sigmoid(MLP(x))`` over ``[B, t, d]``."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(x)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions on ``[B, heads, T, d]``: pair (i, i + d/2) turns by t * 10000^(-2i/d)."""
    length, half = x.shape[-2], x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(length, device=x.device, dtype=torch.float32).outer(rates)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    """Queries ``[B, q, d]`` over ``[B, T, d]`` -> ``[B, q, d]``; mask bool ``[B, T]``."""

    def __init__(self, d: int, heads: int, rotary: bool = False) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.q = nn.Linear(d, d)
        self.kv = nn.Linear(d, 2 * d)
        self.out = nn.Linear(d, d)

    def forward(self, x: torch.Tensor, over: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        width = d // self.heads
        q = self.q(x).view(b, n, self.heads, width).transpose(1, 2)
        k, v = self.kv(over).view(b, over.shape[1], 2, self.heads, width).permute(2, 0, 3, 1, 4)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return self.out(y.transpose(1, 2).reshape(b, n, d))


class InterFormerLayer(nn.Module):
    """Features ``[B, n, d]``, sequence ``[B, leading + T, d]``, mask -> the same two."""

    def __init__(self, n: int, cfg: InterFormerConfig) -> None:
        super().__init__()
        self.cfg, self.n = cfg, n
        d, kept = cfg.d, cfg.leading + cfg.pooled + cfg.latest
        self.compress = LinearCompression(n, cfg.leading)
        self.feature_gate = SelfGate(d)
        self.queries = nn.Parameter(torch.randn(cfg.pooled, d) / d**0.5)
        self.pool = Attention(d, cfg.heads)
        self.sequence_gate = SelfGate(d)
        ensemble = DHENConfig(
            d, 1, n, cfg.hidden, cfg.rank, head=(), modules=("dlrm", "dcn", "linear")
        )
        self.interaction = DHENLayer(n + kept, n, ensemble)
        self.mlp = MLP(n * d, cfg.hidden, n * d)
        self.feature_norm = nn.LayerNorm(d)
        self.personal = MLP(cfg.leading * d, (cfg.leading * d,), d * d)
        self.attention = Attention(d, cfg.heads, rotary=True)
        self.sequence_norm = nn.LayerNorm(d)

    def summary(self, x: torch.Tensor, s: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Cross arch, the sequence's side: ``[B, leading + pooled + latest, d]``."""
        lead, late = self.cfg.leading, self.cfg.latest
        pooled = self.pool(self.queries.expand(s.shape[0], -1, -1), s, mask)
        return self.sequence_gate(torch.cat([s[:, :lead], pooled, s[:, -late:]], dim=1))

    def forward(
        self, x: torch.Tensor, s: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.feature_gate(self.compress(x))
        both = torch.cat([x, self.summary(x, s, mask)], dim=1)
        made = self.mlp(self.interaction(both).flatten(1)).view(-1, self.n, self.cfg.d)
        weight = self.personal(features.flatten(1)).view(-1, self.cfg.d, self.cfg.d)
        own = torch.bmm(s, weight / self.cfg.d**0.5)
        s = self.sequence_norm(s + self.attention(own, own, mask))
        return self.feature_norm(x + made), s


class InterFormerDense(nn.Module):
    """The part to compile.

    embeddings ``[B, n, d]``, dense float ``[B, F]``, sequence ``[B, T, d]`` (newest last) and mask
    bool ``[B, T]`` -> logits ``[B]``.
    """

    def __init__(self, cfg: InterFormerConfig, n_embeddings: int, n_dense: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.tokens = DenseTokens(n_dense, cfg.d, cfg.dense_tokens, cfg.dense_hidden)
        n = n_embeddings + self.tokens.tokens
        self.lead = LinearCompression(n, cfg.leading)
        self.layers = nn.ModuleList(InterFormerLayer(n, cfg) for _ in range(cfg.layers))
        self.compress = LinearCompression(n, cfg.leading)
        kept = 2 * cfg.leading + cfg.latest
        self.head = MLP(kept * cfg.d, cfg.head, 1)

    def forward(
        self,
        embeddings: torch.Tensor,
        dense: torch.Tensor,
        sequence: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        x = self.tokens(embeddings, dense)
        lead, late = self.cfg.leading, self.cfg.latest
        # The leading tokens are always there, so no row of the attention is masked whole.
        s = torch.cat([self.lead(x), sequence.to(x.dtype)], dim=1)
        mask = torch.cat([mask.new_ones(mask.shape[0], lead), mask], dim=1)
        for layer in self.layers:
            x, s = layer(x, s, mask)
        both = torch.cat([self.compress(x), s[:, :lead], s[:, -late:]], dim=1)
        return self.head(both.flatten(1)).squeeze(-1)


class InterFormer(Recommender):
    """Ids, dense, history -> logits ``[B]``."""

    scales = SCALES
    dense_type = InterFormerDense
    uses_history = True
    about = "features and a behaviour sequence that learn from each other (2411.09852)"
