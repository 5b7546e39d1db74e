"""Heads from example inputs: those of the backend, and a model that stays as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import loka_compile
from loka_compile import apply_mods
from loka_compile.module_flow import flow_of
from loka_compile.zoo import MODELS
from loka_compile.zoo import History


class TwoTasks(nn.Module):
    """Registered in an order that says little; a gate in between; one tower ends before a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.click = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 1))
        self.gate = nn.Linear(32, 2)
        self.normed = nn.Sequential(nn.Linear(32, 4), nn.LayerNorm(4))
        self.like = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 1))
        self.bottom = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
        x = self.bottom(x) * scale
        g = torch.softmax(self.gate(x), -1)
        both = torch.cat([self.click(x), self.like(x)], 1)
        return (both * g).sum(1), self.click(x), self.normed(x)


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_heads_hang_on_the_forward_not_on_the_order() -> None:
    model = TwoTasks()
    for inputs in ((torch.randn(2, 8),), {"x": torch.randn(2, 8), "scale": 2.0}):
        flow = flow_of(model, inputs)
        assert flow.heads == {"click.2", "like.2", "gate"}
        assert flow.norms == {"normed.1": True}


def test_the_model_stays_as_it_was() -> None:
    model = TwoTasks()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    flow_of(model, (torch.randn(2, 8, generator=torch.Generator().manual_seed(0)),))
    assert torch.equal(state, torch.get_rng_state())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(p.grad is None for p in model.parameters())


def biases_left_by_the_backend(dense: nn.Module, inputs: tuple[torch.Tensor, ...]) -> set[str]:
    """Linears whose bias gets a gradient with the Mods on: a stripped one gets none."""
    compiled = torch.compile(
        dense, backend=loka_compile.loka_backend, options={"mods": "on", "inner": "eager"}
    )
    compiled(*inputs).float().square().sum().backward()
    return {
        name
        for name, m in dense.named_modules()
        if isinstance(m, nn.Linear) and m.bias is not None and m.bias.grad is not None
    }


@pytest.mark.parametrize("name", ["elfm", "wukong", "interformer"])
def test_apply_mods_and_the_backend_keep_the_same_biases(name: str) -> None:
    kind = MODELS[name]
    model = kind(kind.scales["tiny"], [2] * 6, 3, history=History(0, 5))
    inputs = model.example_inputs(4)
    want = biases_left_by_the_backend(copy.deepcopy(model.dense), inputs)
    assert len(want) == (2 if name == "elfm" else 1)
    for how in ({"example_inputs": inputs}, {}):
        dense = copy.deepcopy(model.dense)
        report = apply_mods(dense, **how)
        kept = {
            n for n, m in dense.named_modules() if isinstance(m, nn.Linear) and m.bias is not None
        }
        assert kept == want == set(report.heads), how


def test_two_towers_keep_both_heads() -> None:
    model = TwoTasks()
    report = apply_mods(model, example_inputs=(torch.randn(2, 8),))
    assert report.heads == ("click.2", "gate", "like.2")
    assert model.click[2].bias is not None and model.normed[0].bias is None


def blocks_of_the_backend(dense: nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, int]:
    compiled = torch.compile(
        dense, backend=loka_compile.loka_backend, options={"mods": "on", "inner": "eager"}
    )
    compiled(*inputs).sum().backward()
    return dict(loka_compile.plan_of(dense).blocks or {})


@pytest.mark.parametrize("name", ["elfm", "wukong", "dhen"])
def test_apply_mods_and_the_backend_give_norms_the_same_blocks(name: str) -> None:
    kind = MODELS[name]
    model = kind(kind.scales["tiny"], [2] * 40, 3, history=History(0, 5))
    inputs = model.example_inputs(4)
    want = blocks_of_the_backend(copy.deepcopy(model.dense), inputs)
    for how in ({"example_inputs": inputs}, {}):
        dense = copy.deepcopy(model.dense)
        apply_mods(dense, **how)
        norms = {n: m for n, m in dense.named_modules() if isinstance(m, loka_compile.BlockNorm)}
        assert {n: m.block for n, m in norms.items()} == want, how
    # 40 fields and 4 tokens in products of rank 8.
    whole = {"layers.0.fmb.norm": 352} if name == "wukong" else {}
    assert {n: b for n, b in want.items() if b > 256} == whole
