"""BlockNorm: RMS over blocks of a row's features, no mean, no bias, optional per-feature gain.

    r_b = 1 / sqrt(mean over block b of x**2 + eps)
    u   = x * r_b           (the normalised value)
    y   = gain * u

Gradient, per block, with g = dL/du:   dL/dx = r_b * (g - u * mean_b(g * u)).
Statistics are FP32 (FP64 for FP64 input): squares summed in half precision overflow.
Source: LoKA (arXiv 2605.10886), section III.B.
"""

from __future__ import annotations

import torch
from torch import Tensor


def block_of(features: int, behind_linear: bool = True) -> int:
    """The default block width for a row of `features` features.

    The whole row up to 256, and where no linear feeds the norm; else the larger of 256 and 128 that
    divides it; else 256, with a ragged last block normalised over its own width.
    """
    if features <= 256 or not behind_linear:
        return features
    for block in (256, 128):
        if features % block == 0:
            return block
    return 256


def count_blocks(features: int, block: int) -> int:
    return -(-features // block)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics of `dtype` data are taken."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def block_mean(x: Tensor, block: int) -> Tensor:
    """(..., N) -> (..., blocks): the mean of each block over its own width."""
    features = x.shape[-1]
    full = features // block
    if full * block == features:
        return x.reshape(*x.shape[:-1], full, block).mean(-1)
    tail = x[..., full * block :].mean(-1, keepdim=True)
    if full == 0:
        return tail
    head = x[..., : full * block].reshape(*x.shape[:-1], full, block).mean(-1)
    return torch.cat([head, tail], dim=-1)


def spread(per_block: Tensor, features: int, block: int) -> Tensor:
    """(..., blocks) -> (..., N): each block's value under each of its features.

    The ragged tail is expanded to its own width and joined on. Cutting an over-long expansion with
    a slice instead is miscompiled by Inductor on CPU (torch 2.13: it reads past the producer of a
    ragged `x * spread(rsqrt(block_mean(x * x)))`); `tests/kernels/test_block_norm.py` guards it.
    """
    full = features // block
    lead = per_block.shape[:-1]
    head = per_block[..., :full].unsqueeze(-1).expand(*lead, full, block)
    head = head.reshape(*lead, full * block)
    if full * block == features:
        return head
    tail = per_block[..., full:].expand(*lead, features - full * block)
    return torch.cat([head, tail], dim=-1)


def normalize(x: Tensor, block: int, eps: float) -> tuple[Tensor, Tensor]:
    """x (..., N) -> (u (..., N), r (..., blocks)), both in the wide dtype."""
    x = x.to(wide_dtype(x.dtype))
    r = torch.rsqrt(block_mean(x * x, block) + eps)
    return x * spread(r, x.shape[-1], block), r


def normalize_backward(g: Tensor, u: Tensor, r: Tensor, block: int) -> Tensor:
    """(dL/du, u (..., N); r (..., blocks)) -> dL/dx, all in the wide dtype."""
    features = u.shape[-1]
    mean = spread(block_mean(g * u, block), features, block)
    return spread(r, features, block) * (g - u * mean)


def block_norm_ref(x: Tensor, gain: Tensor | None, block: int, eps: float) -> Tensor:
    """The definition, block by block, for autograd to differentiate."""
    wide = x.to(wide_dtype(x.dtype))
    parts = [p * torch.rsqrt(p.pow(2).mean(-1, keepdim=True) + eps) for p in wide.split(block, -1)]
    y = torch.cat(parts, dim=-1)
    if gain is not None:
        y = y * gain.to(y.dtype)
    return y.to(x.dtype)
