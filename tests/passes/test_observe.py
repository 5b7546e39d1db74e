"""Observe: state placeholders behind Dynamo's own, observers on inputs, probe on gradients."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from loka_compile import loka_backend
from loka_compile.ledger import LEDGER

OPTIONS = {"inner": "aot_eager", "emulate": True, "mods": "on"}


def run(model: nn.Module, x: torch.Tensor, steps: int) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=loka_backend, options=OPTIONS)
    for _ in range(steps):
        compiled(x).square().sum().backward()


def batches(weight: torch.Tensor, call: int = 0) -> tuple[int, int]:
    entry = LEDGER.find(weight)
    return tuple(entry.statistics[(call, role)].batches for role in ("x", "g"))


def test_once_per_step_also_in_a_checkpointed_block() -> None:
    """The forward is recomputed in the backward; the observer must not fire again."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(32, 32)
            self.b = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(checkpoint(self.a, x, use_reentrant=False).relu())

    model = Block()
    run(model, torch.randn(24, 32), 3)
    assert batches(model.a.weight) == (3, 3)
    assert batches(model.b.weight) == (3, 3)


def test_a_shared_linear_keeps_two_states() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.fc(x).relu() * 100)

    model = Twice()
    x = torch.randn(24, 32)
    run(model, x, 2)
    entry = LEDGER.find(model.fc.weight)
    assert set(entry.statistics) == {(0, "x"), (0, "g"), (1, "x"), (1, "g")}
    first, second = entry.statistics[(0, "x")], entry.statistics[(1, "x")]
    assert first.batch_maxima()[0] == x.abs().max()
    assert second.batch_maxima()[0] > 10 * first.batch_maxima()[0]


def test_observers_do_not_change_values_or_gradients() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    x = torch.randn(24, 32, requires_grad=True)
    results = []
    for emulate in (True, False):
        torch._dynamo.reset()
        model.zero_grad()
        options = {**OPTIONS, "emulate": emulate, "mods": "off"}
        y = torch.compile(model, backend=loka_backend, options=options)(x)
        (gx,) = torch.autograd.grad(y.square().sum(), x)
        results.append((y.detach(), gx))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_nothing_is_observed_without_gradients() -> None:
    model = nn.Linear(32, 32)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=loka_backend, options=OPTIONS)
    with torch.no_grad():
        compiled(torch.randn(24, 32))
    assert LEDGER.find(model.weight).statistics == {}
