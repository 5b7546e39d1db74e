"""Probes under saved-tensor hooks, whose unpacked tensors are copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.autograd.graph import saved_tensors_hooks

import loka_compile
from loka_compile import loka_backend
from loka_compile.ledger import LEDGER
from loka_compile.probe import places

OPTIONS = {"emulate": True, "mods": "off", "heads": (), "inner": "aot_eager"}


def trained(hooks: Callable, inner: str = "aot_eager") -> nn.Module:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    run = torch.compile(model, backend=loka_backend, options={**OPTIONS, "inner": inner})
    for _ in range(10):
        x = torch.randn(24, 32)
        model.zero_grad()
        with hooks():
            loss = run(x).square().sum()
        loss.backward()
    got = model[0].weight.grad
    model.zero_grad()
    model(x).square().sum().backward()
    assert (got - model[0].weight.grad).norm() < 0.3 * got.norm()
    return model


@pytest.mark.parametrize("inner", ["aot_eager", "eager"])
@pytest.mark.parametrize(
    "hooks", [save_on_cpu, lambda: saved_tensors_hooks(Tensor.clone, Tensor.clone)]
)
def test_copies_are_as_good(hooks: Callable, inner: str) -> None:
    model = trained(hooks, inner)
    plan = loka_compile.plan_of(model)
    assert {c.is_low for s in plan.sites.values() for c in s.directions.values()} == {True}
    for layer in (model[0], model[2]):
        held = LEDGER.find(layer.weight).statistics
        assert held[0, "x"].batches == held[0, "g"].batches >= 8
        assert held[0, "g"].recorded_coherence() is not None


def test_values_that_are_rounded_are_told_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a hook that stores everything in half the bytes does it."""
    monkeypatch.setattr(places, "_SAID", set())

    def hooks():
        return saved_tensors_hooks(lambda t: (t.dtype, t.half()), lambda p: p[1].to(p[0]))

    model = trained(hooks)
    assert caplog.text.count("saved-tensor hooks gave") == 1
    for site in loka_compile.plan_of(model).sites.values():
        for choice in site.directions.values():
            assert not choice.is_low and "no gradient of this site was seen" in choice.reason
