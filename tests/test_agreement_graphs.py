"""Several graphs, or blocks of one graph, that ranks have to agree about."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from beside import DIRECTIONS
from beside import FP8
from beside import beside_another
from torch import nn
from torch.utils.checkpoint import checkpoint

import loka_compile
from loka_compile import _compat
from loka_compile import loka_backend
from loka_compile import mods
from loka_compile.agreement import Agreement
from loka_compile.decisions import Decisions
from loka_compile.ledger import LEDGER
from loka_compile.plan import Choice
from loka_compile.plan import Plan
from loka_compile.plan import SitePlan
from loka_compile.runtime import Runtime


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


def blocks_of_one_graph(options: dict, count: int = 3) -> nn.ModuleList:
    """Compiled one by one; Dynamo makes one graph of them."""
    torch._dynamo.reset()
    blocks = loka_compile.name_layers(nn.ModuleList(Block() for _ in range(count)))
    for one in blocks:
        one.compile(backend=loka_backend, options={"inner": "aot_eager", "heads": (), **options})
    return blocks


@pytest.fixture
def ran(monkeypatch) -> list[tuple[bool, tuple]]:
    """(inside a backward, kernels) of every call."""
    calls, run = [], Runtime._run

    def recorded(self, binding, built, args, states):
        try:
            return run(self, binding, built, args, states)
        finally:  # A checkpoint stops its second forward by an exception.
            calls.append((_compat.in_backward(), built.decided.kernels))

    monkeypatch.setattr(Runtime, "_run", recorded)
    return calls


def test_blocks_that_share_a_graph_and_differ_settle_at_once(monkeypatch, ran) -> None:
    """Not whenever something else moves, which it does on each rank at another step."""
    monkeypatch.setattr(mods, "settle", lambda *args: None)
    sites = {}
    for i, kernel in enumerate((FP8, Choice(), FP8)):
        directions = dict.fromkeys(DIRECTIONS, kernel)
        sites[f"{i}.linear"] = SitePlan(f"{i}.linear", 16, 32, 32, "float32", directions=directions)
    blocks = blocks_of_one_graph({"emulate": True, "mods": "off", "plan": Plan(sites=sites)})
    for step in range(3):
        ran.clear()
        x = torch.randn(16, 32, requires_grad=True)
        for one in blocks:
            x = one(x)
        x.sum().backward()
        assert step == 0 or not any(kernels for _, kernels in ran), step


def test_a_checkpoint_runs_again_what_it_ran_while_another_block_changes(monkeypatch, ran) -> None:
    """Each block has a talk of its own, which may end while the others' backwards are to come."""
    beside = beside_another(monkeypatch)
    assert beside.size == 2
    propose, turn = Decisions.propose, []

    def differ(self, observed, args):
        found = propose(self, observed, args)
        turn.append(1)
        if len(turn) == 2:
            return {n: replace(p, directions=dict.fromkeys(DIRECTIONS, Choice()))
                    for n, p in found.items()}  # fmt: skip
        return found

    monkeypatch.setattr(Decisions, "propose", differ)
    options = {"emulate": True, "mods": "off", "recipes": ["rowwise"], "libraries": ["torch"]}
    blocks = blocks_of_one_graph(options)
    for _ in range(20):
        ran.clear()
        x = torch.randn(16, 32, requires_grad=True)
        for one in blocks:
            x = checkpoint(one, x, use_reentrant=False)
        x.sum().backward()
        first = [kernels for again, kernels in ran if not again]
        second = [kernels for again, kernels in ran if again]
        assert first == second[::-1] and len(first) == 3
    assert len(turn) == 3


def test_ranks_that_are_set_up_late_are_asked_all_the_same(monkeypatch) -> None:
    """A forward and a backward to warm up, before torch.distributed is there."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    options = {"inner": "eager", "emulate": True, "mods": "off", "recipes": ["rowwise"]}
    run = torch.compile(model, backend=loka_backend, options=options)
    theirs = None
    for step in range(28):
        if step == 3:
            other = beside_another(monkeypatch)
        run(torch.randn(16, 32)).sum().backward()
        for ours in LEDGER.entry(model[0].weight).agreements.values():
            if theirs is None:
                theirs = Agreement(other.channel(ours.channel.name))
                theirs.join()
            theirs.clock += 1
            theirs.poll("the Mods off", dict, lambda plans: [("0", "fwd", "no FP8 units")])
    assert theirs is not None and theirs.settled
    assert not loka_compile.plan_of(model).sites["0"].choice("fwd").is_fp8


def test_layers_that_may_leave_high_precision_later_are_talked_about_again(monkeypatch) -> None:
    """The same parameters under other options: what was agreed on says nothing of these."""
    beside_another(monkeypatch)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    options = {"inner": "eager", "emulate": True, "mods": "off", "recipes": ["rowwise"]}
    agreements = LEDGER.entry(model[0].weight).agreements
    talks = []
    for exclude in (["2"], []):
        torch._dynamo.reset()
        run = torch.compile(model, backend=loka_backend, options={**options, "exclude": exclude})
        for _ in range(16):
            run(torch.randn(16, 32)).sum().backward()
        talks += [one for one in agreements.values() if one not in talks]
    assert len(talks) == 2 and all(one.settled for one in talks)
    assert set(loka_compile.plan_of(model).sites) == {"0", "2"}
