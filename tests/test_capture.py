"""The blocks of norms: option, plan or rule; recorded, and kept by whoever is given the plan."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import loka_compile
from loka_compile.capture import block_rule
from loka_compile.options import Options
from loka_compile.plan import Plan
from loka_compile.plan_diff import diff


def test_the_option_comes_before_the_plan_and_the_plan_before_the_rule() -> None:
    old, new = Plan(blocks=None), Plan(blocks={"n": 64})
    for options, plan, fed, want in (
        (Options(), None, True, 256),
        (Options(), None, False, 320),
        (Options(), old, False, 256),
        (Options(), new, True, 64),
        (Options(), Plan(blocks={"other": 64}), False, 320),
        (Options(block=128), new, False, 128),
        (Options(block=512), None, True, 320),
    ):
        assert block_rule(options, plan)("n", 320, fed) == want
    assert block_rule(Options(), new)("n", 32, True) == 32


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.linear = nn.LayerNorm(320), nn.Linear(320, 320)
        self.second, self.head = nn.LayerNorm(320), nn.Linear(320, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.second(self.linear(self.first(x)))))


def train(model: nn.Module, plan: Plan | None) -> tuple[torch.Tensor, dict[str, int] | None]:
    torch._dynamo.reset()
    options = {"mods": "on", "inner": "eager", **({} if plan is None else {"plan": plan})}
    compiled = torch.compile(model, backend=loka_compile.loka_backend, options=options)
    torch.manual_seed(1)
    # Halves of different size, so that a statistic over both shows.
    x = torch.randn(8, 320) * torch.linspace(0.1, 3, 320)
    y = compiled(x)
    y.sum().backward()
    return y.detach(), loka_compile.plan_of(model).blocks


@pytest.mark.parametrize("age", ["new", "old"])
def test_a_plan_keeps_the_blocks_it_was_made_with(age: str, tmp_path) -> None:
    model = Model()
    y, blocks = train(model, None)
    assert blocks == {"first": 320, "second": 256}
    made = loka_compile.plan_of(model)
    path = made.save(tmp_path / "plan.json")
    data = json.loads(path.read_text())
    if age == "old":
        del data["blocks"]
    plan = Plan.from_dict(data)
    assert (plan.blocks is None) is (age == "old")
    again = Model()
    again.load_state_dict(model.state_dict())
    z, kept = train(again, plan)
    assert kept == {"first": 320 if age == "new" else 256, "second": 256}
    assert torch.equal(y, z) is (age == "new")


def test_plans_with_and_without_blocks_merge() -> None:
    old, new = Plan(blocks=None), Plan(blocks={"a": 64})
    assert old.merge(old).blocks is None
    assert old.merge(new).blocks == new.merge(old).blocks == {"a": 64}
    assert new.merge(Plan(blocks={"a": 128, "b": 8})).blocks == {"a": 128, "b": 8}
    assert list(diff(new, Plan(blocks={"a": 128, "b": 8}))) == [
        "a: block_norm of 64 -> 128",
        "b: block_norm of the default -> 8",
    ]
