"""Decisions belong to parameters: instances, copies, late checkpoints, shared graphs, plans."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from backend_net import FP8
from backend_net import QUICK
from backend_net import Net
from backend_net import compile_
from backend_net import modded
from backend_net import train
from torch import nn

import loka_compile
from loka_compile import loka_backend
from loka_compile import names
from loka_compile.ledger import LEDGER


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(48, 32)


def test_two_instances_of_one_class_keep_apart(x: torch.Tensor) -> None:
    """Dynamo shares the graph between them; decisions and statistics must not be shared."""
    torch._dynamo.reset()
    a, b = Net(), Net()
    run_a = torch.compile(a, backend=loka_backend, options=FP8)
    run_b = torch.compile(b, backend=loka_backend, options=FP8)
    train(a, run_a, 10, x)
    assert loka_compile.plan_of(a).active and not loka_compile.plan_of(b).active
    torch.testing.assert_close(run_b(x), modded(b, x), rtol=1e-4, atol=1e-5)


def test_deepcopy_of_a_trained_model_is_left_alone_and_warned(
    x: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    options = {**QUICK, "mods": "auto"}
    train(model, compile_(model, options), 3, x, lr=1e-1)
    ema = copy.deepcopy(model)
    run = torch.compile(ema, backend=loka_backend, options=options)
    with caplog.at_level(logging.WARNING, "loka_compile"), torch.no_grad():
        torch.testing.assert_close(run(x), ema(x), rtol=1e-5, atol=1e-6)
    assert "Mods are OFF" in caplog.text and "mark_modded" in caplog.text
    loka_compile.mark_modded(ema)
    with torch.no_grad():
        torch.testing.assert_close(run(x), modded(ema, x), rtol=1e-5, atol=1e-6)


def test_checkpoint_loaded_after_the_first_call_is_noticed(x: torch.Tensor) -> None:
    """Until a backward has run the decision for a fresh-looking model is provisional."""
    trained = Net()
    with torch.no_grad():
        trained.net[1].weight.mul_(1.5)
    model = Net()
    compiled = compile_(model, {**QUICK, "mods": "auto"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), modded(model, x), rtol=1e-5, atol=1e-6)
        model.load_state_dict(trained.state_dict())
        torch.testing.assert_close(compiled(x), trained(x), rtol=1e-5, atol=1e-6)


def test_mods_are_announced_once(x: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    compiled = compile_(model, FP8)
    with caplog.at_level(logging.WARNING, "loka_compile"):
        train(model, compiled, 11, x)
        model.eval()
        with torch.no_grad():
            compiled(x)
    said = [r for r in caplog.records if "Mods are ON" in r.getMessage()]
    assert len(said) == 1
    assert "options={'mods': 'off'}" in said[0].getMessage()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc(x))


def test_regional_compile_keeps_statistics_apart(x: torch.Tensor) -> None:
    """Equal blocks share one graph; `name_layers` tells them apart."""
    torch._dynamo.reset()
    blocks = nn.ModuleList(Block() for _ in range(3))
    loka_compile.name_layers(blocks)
    for block in blocks:
        block.compile(backend=loka_backend, options=FP8)
    for _ in range(11):
        h = x
        for block in blocks:
            h = block(h)
        h.square().sum().backward()
    sites = loka_compile.plan_of(blocks).sites
    assert set(sites) == {"0.fc", "1.fc", "2.fc"}
    first = LEDGER.find(blocks[0].fc.weight).statistics[(0, "x")]
    second = LEDGER.find(blocks[1].fc.weight).statistics[(0, "x")]
    assert not torch.equal(first.reservoir(), second.reservoir())


def test_a_plan_restores_block_and_heads(x: torch.Tensor) -> None:
    model = Net()
    options = {**FP8, "block": 16, "heads": ["projection"]}
    train(model, compile_(model, options), 10, x)
    plan = loka_compile.plan_of(model)
    assert plan.block == 16 and plan.heads == ("projection",)
    with torch.no_grad():
        want = compile_(model, options)(x)
        got = compile_(copy.deepcopy(model), {**FP8, "mods": "auto", "plan": plan})(x)
    assert torch.equal(got, want)


def test_a_plan_without_sites_is_probed_on(x: torch.Tensor) -> None:
    """Saved before the swap: its Mods hold, its kernels are still to be chosen."""
    model = Net()
    train(model, compile_(model, FP8), 3, x)
    early = loka_compile.plan_of(model)
    assert early.mods and not early.active
    resumed = copy.deepcopy(model)
    train(resumed, compile_(resumed, {**FP8, "mods": "auto", "plan": early}), 10, x)
    assert loka_compile.plan_of(resumed).active


def test_patterns_may_name_layers_of_other_graphs(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Models of other tests may still be alive under their names.
    monkeypatch.setattr(names, "_REGISTERED", {})
    torch._dynamo.reset()
    blocks = nn.ModuleList(Block() for _ in range(2))
    options = {**FP8, "exclude": ["1.fc"]}
    blocks[0].compile(backend=loka_backend, options=options)
    with pytest.raises(Exception, match="name_layers"):
        blocks[0](x)
    torch._dynamo.reset()
    loka_compile.name_layers(blocks)
    blocks[0](x)
