"""Two graphs of the same parameters with other Mods: which of them decides for the rest."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import loka_compile
from loka_compile import loka_backend
from loka_compile.ledger import LEDGER
from loka_compile.mod_set import EVERY

KEEP = {"no_bias": ["0"]}
OTHER = [{"mods": "off"}, {"mods": "on", "keep": KEEP}, {"keep": KEEP}]
X = torch.ones(3, 16)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 2))


def compile_(model: nn.Module, **options):
    return torch.compile(model, backend=loka_backend, options={"inner": "eager", **options})


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()


@pytest.fixture
def model() -> nn.Module:
    return net()


@pytest.fixture
def trains(model: nn.Module):
    """`model` after one training step with "auto", which found it fresh; nothing is fresh now."""
    compiled = compile_(model)
    compiled(torch.randn(8, 16)).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    assert loka_compile.plan_of(model).mods == EVERY
    return compiled


def result(model: nn.Module) -> torch.Tensor:
    """What an evaluation that says nothing of Mods gets."""
    with torch.no_grad():
        return compile_(model)(X)


@pytest.mark.parametrize("given", OTHER)
def test_an_evaluation_runs_with_its_own_and_changes_nothing(model, trains, given, caplog) -> None:
    before, plan = trains(X), loka_compile.plan_of(model)
    other = compile_(model, **given)
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        seen = other(X)
    assert not torch.allclose(seen, before)
    assert "these parameters ran with Mods on;" in caplog.text
    caplog.clear()
    # Whatever decision moves, every graph looks again.
    LEDGER.touch()
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(trains(X), before)
        torch.testing.assert_close(result(model), before)
    assert "Mods" not in caplog.text
    with torch.no_grad():
        torch.testing.assert_close(other(X), seen)
    assert loka_compile.plan_of(model) == plan


@pytest.mark.parametrize("given", OTHER)
def test_a_training_wins_with_its_first_backward(model, trains, given, caplog) -> None:
    before, other = trains(X), compile_(model, **given)
    with caplog.at_level(logging.WARNING):
        after = other(X)
    assert not torch.allclose(after, before)
    assert "these parameters ran with Mods on;" in caplog.text
    LEDGER.touch()
    torch.testing.assert_close(trains(X), before)
    after.sum().backward()
    for call in (trains, other):
        torch.testing.assert_close(call(X), after)
    torch.testing.assert_close(result(model), after)
    plan = loka_compile.plan_of(model)
    assert plan.mods == (() if given.get("mods") == "off" else EVERY)
    assert plan.kept == ({"no_bias": ("0",)} if plan.mods else {})


def test_what_an_evaluation_keeps_before_the_first_backward_does_not_stick(model) -> None:
    y = compile_(model)(X)
    with torch.no_grad():
        compile_(model, mods="on", keep=KEEP)(X)
    y.sum().backward()
    assert loka_compile.plan_of(model).kept == {}
    torch.testing.assert_close(result(model), y)
