"""Building blocks that several models share, in the spellings that production code uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

STYLES = ("norm_silu", "silu", "relu", "swish_layernorm")


class SwishLayerNorm(nn.Module):
    """``x * sigmoid(LayerNorm(x))`` over the last dimension; keeps the shape."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(features), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.norm(x)


class MLP(nn.Sequential):
    """``[.., inputs]`` -> ``[.., hidden[-1]]``, or ``[.., outputs]`` by one more plain Linear.

    style: what follows each hidden Linear. ``norm_silu``: LayerNorm and SiLU; ``silu`` and
    ``relu``: no norm; ``swish_layernorm``: the gate form above.
    """

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        outputs: int | None = None,
        style: str = "norm_silu",
    ) -> None:
        if style not in STYLES:
            raise ValueError(f"unknown style {style!r}; use one of {', '.join(STYLES)}")
        blocks: list[nn.Module] = []
        for width in hidden:
            blocks.append(nn.Linear(inputs, width))
            if style in ("relu", "silu"):
                blocks.append(nn.ReLU() if style == "relu" else nn.SiLU())
            elif style == "swish_layernorm":
                blocks.append(SwishLayerNorm(width))
            else:
                blocks += [nn.LayerNorm(width), nn.SiLU()]
            inputs = width
        if outputs is not None:
            blocks.append(nn.Linear(inputs, outputs))
        super().__init__(*blocks)


class DenseTokens(nn.Module):
    """Embeddings ``[B, n, d]``, dense ``[B, F]`` -> ``[B, n + tokens, d]``; as given when F = 0."""

    def __init__(
        self,
        n_dense: int,
        d: int,
        tokens: int = 1,
        hidden: Sequence[int] = (256,),
        style: str = "norm_silu",
    ) -> None:
        super().__init__()
        self.d = d
        self.tokens = tokens if n_dense else 0
        self.mlp = MLP(n_dense, hidden, tokens * d, style) if n_dense else None

    def forward(self, embeddings: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        if self.mlp is None:
            return embeddings
        made = self.mlp(dense).view(-1, self.tokens, self.d)
        # Under autocast the tokens are bf16 while the looked-up rows are fp32.
        return torch.cat([embeddings, made.to(embeddings.dtype)], dim=1)


class LinearCompression(nn.Module):
    """``[B, n, d]`` -> ``[B, m, d]``: one linear map over the embeddings."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, m))
        nn.init.kaiming_uniform_(self.weight.T, a=5**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.permute(0, 2, 1) @ self.weight).permute(0, 2, 1)


class PairwiseDots(nn.Module):
    """``[B, n, d]`` -> ``[B, n (n - 1) / 2]``: inner products of all pairs of embeddings."""

    row: torch.Tensor
    column: torch.Tensor

    def __init__(self, n: int) -> None:
        super().__init__()
        row, column = torch.tril_indices(n, n, offset=-1)
        self.register_buffer("row", row, persistent=False)
        self.register_buffer("column", column, persistent=False)
        self.outputs = n * (n - 1) // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, x.transpose(1, 2))[:, self.row, self.column]


class Cross(nn.Module):
    """DCN-V2 cross layer: ``x0, x [B, D]`` -> ``x0 * (W x + b) + x``; W = U V when ``rank``."""

    def __init__(self, width: int, rank: int | None = None) -> None:
        super().__init__()
        self.v = nn.Linear(width, rank, bias=False) if rank else nn.Identity()
        self.w = nn.Linear(rank or width, width)

    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x0 * self.w(self.v(x)) + x


class CrossNet(nn.Module):
    """``[B, D]`` -> ``[B, D]``: ``layers`` cross layers (DCN-V2, arXiv 2008.13535)."""

    def __init__(self, width: int, layers: int, rank: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Cross(width, rank) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x0 = x
        for layer in self.layers:
            x = layer(x0, x)
        return x
