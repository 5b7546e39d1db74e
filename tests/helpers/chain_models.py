"""Linear -> norm -> activation models as people write them, and what Mods make of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from loka_compile.kernels.block_norm import block_norm_ref
from loka_compile.kernels.block_norm import block_of

K, N = 6, 10
LINEAR = torch._C._nn.linear


def perturb(model: nn.Module) -> nn.Module:
    """Gains and biases away from 1 and 0, so that a lost one shows."""
    torch.manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.3 * torch.randn_like(p))
    return model


class Chain(nn.Module):
    """Linear -> norm -> act, with a function between and one after."""

    def __init__(self, norm=None, act=None, between=None, features=N, **linear) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(K, features, **linear)
        self.norm = nn.LayerNorm(features) if norm is None else norm
        self.act = nn.Identity() if act is None else act
        self.between = nn.Identity() if between is None else between
        perturb(self)

    def forward(self, x):
        return self.act(self.norm(self.between(self.linear(x))))


class Spelled(nn.Module):
    """x * sigmoid(x) as an activation."""

    def forward(self, x):
        return x * torch.sigmoid(x)


class Functional(nn.Module):
    def __init__(self, fn) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


class SwishLayerNorm(nn.Module):
    """y * sigmoid(norm(y)), optionally in FP32 between casts."""

    def __init__(self, norm, wide=False) -> None:
        super().__init__()
        self.sequential = nn.Sequential(norm, nn.Sigmoid())
        self.wide = wide

    def forward(self, y):
        if not self.wide:
            return y * self.sequential(y)
        y32 = y.float()
        return (self.sequential(y32) * y32).to(y.dtype)


class WrittenRMS(nn.Module):
    """RMSNorm as LLaMA-style code has it."""

    def __init__(self, features=N, eps=1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.eps = eps

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight.to(x.dtype)


def linear_ref(model, x):
    return F.linear(x, model.linear.weight)


def norm_ref(z, norm, eps=None):
    n = z.shape[-1]
    eps = norm.eps if eps is None else eps
    return block_norm_ref(z, getattr(norm, "weight", None), block_of(n), eps)


def reference(act=lambda v: v, eps=None):
    return lambda model, x: act(norm_ref(linear_ref(model, x), model.norm, eps))


EPS32 = torch.finfo(torch.float32).eps


def gate_ref(model, x):
    z = linear_ref(model, x)
    v = norm_ref(z, model.act.sequential[0])
    if v.dtype == torch.float64:
        # F.hardsigmoid has an FP32 1/6 in its FP64 gradient.
        return z * (v + 3).clamp(0, 6) / 6
    return z * F.hardsigmoid(v)


class Grouped(nn.Module):
    """Variant 11: a norm over each group of d features."""

    def __init__(self, n=3, d=8, act=None, how="view") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(K, n * d)
        self.norm = nn.LayerNorm(d)
        self.act = act or nn.Identity()
        self.n, self.d, self.how = n, d, how
        perturb(self)

    def forward(self, x):
        y = self.linear(x)
        if self.how == "view":
            y = y.view(*x.shape[:-1], self.n, self.d)
        elif self.how == "reshape":
            y = torch.reshape(y, (-1, self.n, self.d))
        else:
            y = y.unflatten(-1, (self.n, self.d))
        return self.act(self.norm(y))
