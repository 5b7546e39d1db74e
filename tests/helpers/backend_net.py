"""The model of the backend's end-to-end tests, what its Mods make of it, and a training loop."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from loka_compile import loka_backend
from loka_compile.kernels.block_norm import block_norm_ref

QUICK = {"inner": "aot_eager"}
FP8 = {**QUICK, "emulate": True, "mods": "on"}


class Net(nn.Module):
    """Linear -> LayerNorm -> SiLU twice, a Parameter matmul, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(32, 64),
            nn.LayerNorm(64),
            nn.SiLU(),
            nn.Linear(64, 128),
            nn.LayerNorm(128),
            nn.SiLU(),
        )
        self.projection = nn.Parameter(torch.randn(128, 64) * 0.1)
        self.head = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x) @ self.projection)


def modded(m: Net, x: torch.Tensor) -> torch.Tensor:
    """What Net computes with the Mods on, written by hand in plain torch."""
    for at in (0, 3):
        linear, norm = m.net[at], m.net[at + 1]
        z = F.linear(x, linear.weight)
        x = F.hardswish(block_norm_ref(z, norm.weight, min(z.shape[-1], 256), norm.eps))
    return m.head(x @ m.projection)


def compile_(model: nn.Module, options: dict, **kwargs):
    torch._dynamo.reset()
    return torch.compile(model, backend=loka_backend, options=options, **kwargs)


def train(model: nn.Module, compiled, steps: int, x: torch.Tensor, lr: float = 1e-2) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr)
    losses = []
    for _ in range(steps):
        loss = (compiled(x).float() - x[..., :1]).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: p.grad for n, p in model.named_parameters()}
