"""What a graph's output is to the loss: logits, probabilities, or neither. Seen from its gradient.

A backend is not told where the logits are. But the log loss of a logit z has the gradient
(sigmoid(z) - y) / c, with y in {0, 1} and one c for the whole batch (its size, a loss scale, a
task's weight, ...):

    c_n = p_n / |g_n|  where g_n > 0 (y = 0),   (1 - p_n) / |g_n|  where g_n < 0 (y = 1)

An output whose c_n all agree is a logit of a plain log loss; of a probability p the gradient is
(p - y) / (p (1 - p) c). An activation between two graphs, a weighted loss or another loss gives
numbers that do not agree, and no score is made up for it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

LOGITS, PROBABILITIES = "logits", "probabilities"

#: Widest output that may be logits of several tasks: as wide as a head may be.
WIDEST = 16
#: Least entries with a gradient that tell one loss from another.
LEAST = 16
#: Relative spread that rounding to bf16 explains (the middle 90 %, either side).
SPREAD = 0.03


def may_be_logits(value: object) -> bool:
    """Is this output of a shape that logits have, (B,) or (B, up to 16), and differentiable?"""
    return (
        isinstance(value, Tensor)
        and value.grad_fn is not None
        and value.is_floating_point()
        and value.dim() in (1, 2)
        and value.shape[0] > 0
        and (value.dim() == 1 or 0 < value.shape[1] <= WIDEST)
    )


@torch.no_grad()
def kind_of(output: Tensor, gradient: Tensor) -> str | None:
    """LOGITS, PROBABILITIES or None. output, gradient: (B,) or (B, T). Waits for the device.

    Tasks are looked at one by one: each may have a weight of its own in the loss.
    """
    columns = output.reshape(output.shape[0], -1).unbind(1)
    gradients = gradient.reshape(gradient.shape[0], -1).unbind(1)
    kinds = {_kind(z.double(), g.double()) for z, g in zip(columns, gradients, strict=True)}
    return kinds.pop() if len(kinds) == 1 else None


def _kind(z: Tensor, g: Tensor) -> str | None:
    live = (g != 0) & torch.isfinite(z) & torch.isfinite(g)
    z, g = z[live], g[live]
    if z.numel() < LEAST:
        return None
    p = z.sigmoid()
    if _agree(torch.where(g > 0, p, 1 - p) / g.abs()):
        return LOGITS
    inside = bool(((z > 0) & (z < 1)).all())
    if inside and _agree(torch.where(g > 0, 1 / (1 - z), 1 / z) / g.abs()):
        return PROBABILITIES
    return None


def _agree(c: Tensor) -> bool:
    # Of a million at most: torch.quantile takes no more than 16.
    c = c[:: max(c.numel() // 1_000_000, 1)]
    low, middle, high = torch.quantile(c, c.new_tensor([0.05, 0.5, 0.95])).tolist()
    return low >= middle * (1 - SPREAD) and high <= middle * (1 + SPREAD)


@torch.no_grad()
def seed(kind: str, output: Tensor, generator: torch.Generator) -> Tensor:
    """v, of the output's shape and dtype, with E (v . dz)^2 = 2 KL of a shift dz, per sample.

    sqrt(p (1 - p)) times a random sign: of one logit the sign is nothing, of several it keeps the
    tasks from cancelling.
    """
    z = output.double()
    if kind == LOGITS:
        p = z.sigmoid()
        size = (p * (1 - p)).sqrt()
    else:
        size = (z * (1 - z)).clamp(min=1e-12).rsqrt()
    sign = torch.randint(0, 2, z.shape, generator=generator).to(z.device) * 2 - 1
    return (size * sign).to(output.dtype)


@torch.no_grad()
def divergence(kind: str, a: Tensor, b: Tensor) -> Tensor:
    """KL(a || b) per sample (B,), fp64, summed over tasks; a, b (B,) or (B, T), as `kind` says."""
    a, b = a.double(), b.double()
    if kind == PROBABILITIES:
        a, b = torch.logit(a, eps=1e-12), torch.logit(b, eps=1e-12)
    p = a.sigmoid()
    each = p * (softplus(-b) - softplus(-a)) + (1 - p) * (softplus(b) - softplus(a))
    return each.reshape(each.shape[0], -1).sum(1)
