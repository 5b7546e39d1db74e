"""The epilogue of a fused chain in plain torch: pointwise part, BlockNorm, activation, gate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from loka_compile.kernels import block_norm as bn
from loka_compile.kernels import hard_swish as hs

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda t: t,
    "hard_swish": hs.hard_swish,
    "hard_sigmoid": hs.hard_sigmoid,
    "relu": torch.relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
}


def lanes_of(n: int, block: int) -> int:
    """How many partial sums of dL/dgain, (lanes, N), a fused backward leaves to its caller: one per
    program that works off rows of a block. Of N alone, so that a symbolic M needs no guard."""
    return max(1, min(512, 1024 // bn.count_blocks(n, block)))


def pointwise_ref(
    z: Tensor, bias: Tensor | None, mul: Tensor | None, addend: Tensor | None
) -> tuple[Tensor, Tensor]:
    """z (M, N) -> t = z + bias, p = t * mul + addend, in the wide dtype of z."""
    t = z.to(bn.wide_dtype(z.dtype))
    if bias is not None:
        t = t + bias.to(t.dtype)
    p = t if mul is None else t * mul.to(t.dtype)
    return t, (p if addend is None else p + addend.to(t.dtype))


def epilogue_ref(
    z: Tensor,
    gain: Tensor | None,
    block: int,
    eps: float,
    act: str,
    gate: bool,
    norm: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """z (M, N) -> (y, u (M, N), r (M, blocks)), all in the wide dtype of z; without
    `norm`, u is z and r is 1."""
    z = z.to(bn.wide_dtype(z.dtype))
    if norm:
        u, r = bn.normalize(z, block, eps)
    else:
        u, r = z, z.new_ones((*z.shape[:-1], bn.count_blocks(z.shape[-1], block)))
    v = u if gain is None else u * gain.to(u.dtype)
    y = ACTIVATIONS[act](v)
    return (y * z if gate else y), u, r
