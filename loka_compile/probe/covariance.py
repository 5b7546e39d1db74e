"""The paper's full covariance of a site's input, online: probe_model="gaussian".

    S <- S + Xc^T Xc + d d^T na n / (na + n),    d = mean of the batch - mean before

beside the Welford state, whose mean and count it shares (so it is updated before them). FP64:
K^2 numbers of a covariance meet Cholesky, and naive FP32 sums lose 2 % where the mean dwarfs the
spread. Inputs wider than 4,096 and what would pass the memory bound get none: their Gaussian is
that of the rows held (`probe/models.py`), which needs no K^2.
Source: LoKA (arXiv 2605.10886), III.A.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

WIDEST = 4096
#: Of one graph, and at most this share of the device's memory.
BYTES = 512 << 20
SHARE = 0.005
#: Numbers of a batch that are widened at a time.
_CHUNK = 1 << 23


def affordable(features: Mapping[str, int], device: torch.device) -> frozenset[str]:
    """The sites (name -> K) that get a covariance: the narrow ones first, within the bound."""
    room = float(BYTES)
    if device.type == "cuda":
        room = min(room, SHARE * torch.cuda.get_device_properties(device).total_memory)
    chosen = set()
    for name, k in sorted(features.items(), key=lambda item: item[1]):
        room -= 8 * k * k
        if k > WIDEST or room < 0:
            break
        chosen.add(name)
    return frozenset(chosen)


def accumulate(
    x: Tensor, wanted: Tensor | None, mean: Tensor, count: Tensor, scatter: Tensor
) -> None:
    """Add x (M, K) to scatter (K, K) fp64, which belongs to `count` rows of that `mean` (K,).

    wanted: bool (M,) or None. Rows with a non-finite value are left out, as everywhere.
    """
    step = max(_CHUNK // x.shape[1], 1)
    good = torch.isfinite(x).all(dim=1)
    if wanted is not None:
        good = good & wanted
    n = good.sum().double()
    total = torch.zeros_like(mean)
    for part, keep in zip(x.split(step), good.split(step), strict=True):
        total += torch.where(keep.unsqueeze(1), part, 0).sum(0, dtype=torch.float64)
    own = total / n.clamp(min=1)
    for part, keep in zip(x.split(step), good.split(step), strict=True):
        centred = torch.where(keep.unsqueeze(1), part.double() - own, 0.0)
        scatter.addmm_(centred.t(), centred)
    delta = own - mean
    scatter.addr_(delta, delta * (count * n / (count + n).clamp(min=1)))


def packed(covariance: Tensor) -> Tensor:
    """The lower triangle, row by row: (K (K + 1) / 2,)."""
    return covariance[torch.ones_like(covariance, dtype=torch.bool).tril()]


def unpacked(triangle: Tensor, features: int) -> Tensor:
    """The symmetric (K, K) of a lower triangle."""
    full = triangle.new_zeros((features, features))
    full[torch.ones((features, features), dtype=torch.bool).tril()] = triangle
    return full + full.tril(-1).t()
