"""When a cached weight is quantised again: every kind of change, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loka_compile.lowering.weight_cache import Cache
from loka_compile.lowering.weight_cache import Stored

KERNEL = "torch:rowwise"


@pytest.fixture
def weights() -> list[torch.Tensor]:
    with torch.inference_mode():
        inference = torch.randn(16, 32)
    return [nn.Parameter(torch.randn(16, 32)) for _ in range(3)] + [inference]


def cached(weights, monkeypatch, frozen: bool = False):
    """A call that refreshes, and says which weights were quantised again."""
    renewed: list[Stored] = []
    real = Stored.renew
    monkeypatch.setattr(Stored, "renew", lambda one, w: (renewed.append(one), real(one, w)))
    stored = [Stored.of(w, KERNEL, torch.float32, False) for w in weights]
    cache = Cache(stored, range(len(weights)), frozen)

    def call() -> list[int]:
        renewed.clear()
        cache.refresh(weights)
        for one, w in zip(stored, weights, strict=True):
            wide = one.q.float() * one.scale
            assert frozen or (wide - w.detach()).norm() < 0.05 * w.detach().norm()
        return [stored.index(one) for one in renewed]

    call()
    assert call() == call() == []
    return call


@pytest.mark.parametrize("count", [3, 4])
def test_each_kind_of_change(count, weights, monkeypatch) -> None:
    """Alone and beside a weight that has no version counter."""
    weights = weights[:count]
    call = cached(weights, monkeypatch)
    with torch.no_grad():
        weights[1].mul_(2)
    assert call() == [1] and call() == []
    weights[2].data = torch.randn(16, 32)
    assert call() == [2] and call() == []
    for w in weights[:3]:
        w.grad = torch.ones_like(w)
    # A step may write where no counter sees it, as fused optimizers do.
    torch.optim.SGD(weights[:3], 0.1).step()
    assert call() == list(range(count)) and call() == []


def test_frozen_means_frozen(weights, monkeypatch) -> None:
    call = cached(weights[:3], monkeypatch, frozen=True)
    with torch.no_grad():
        weights[1].mul_(2)
    assert call() == []
