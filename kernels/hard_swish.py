"""Hard Swish and hard sigmoid, with the derivative rule that PyTorch has at the kinks.

    hard_sigmoid(v) = clamp(v + 3, 0, 6) / 6         hard_swish(v) = v * hard_sigmoid(v)

hard_swish' is v / 3 + 1/2 strictly inside (-3, 3), 0 at and below -3, 1 at and above 3; it jumps at
both kinks, and the outer value holds there, as in `F.hardswish`.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: The least value of hard_swish, at v = -1.5.
LEAST = -0.375


def hard_sigmoid(v: Tensor) -> Tensor:
    return (v + 3).clamp(0, 6) / 6


def hard_sigmoid_grad(v: Tensor) -> Tensor:
    """d hard_sigmoid / dv: 1/6 strictly inside (-3, 3), as `F.hardsigmoid` has it."""
    # Divided in v's own dtype: `where` between two Python numbers rounds them to FP32 first.
    return ((v > -3) & (v < 3)).to(v.dtype) / 6


def hard_swish(v: Tensor) -> Tensor:
    return v * hard_sigmoid(v)


def hard_swish_grad(v: Tensor) -> Tensor:
    inside = v / 3 + 0.5
    return torch.where(v <= -3, 0.0, torch.where(v >= 3, 1.0, inside)).to(v.dtype)
