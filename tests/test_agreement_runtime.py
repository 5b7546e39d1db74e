"""Ranks in one process, through the whole backend: random programs, each rank disturbed on its own.

Every rank has a model with code of its own (Dynamo would share one graph), a world over one store,
and what a process has of failed kernels. All run one program; they may be some calls apart.
"""

from __future__ import annotations

import random
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn

import loka_compile
from loka_compile import agreement
from loka_compile import demotion
from loka_compile import failure_board
from loka_compile import loka_backend
from loka_compile import objections
from loka_compile.failure_board import Board
from loka_compile.ledger import LEDGER
from loka_compile.plan import Choice
from loka_compile.plan import Plan
from loka_compile.plan import SitePlan
from loka_compile.ranks import World
from loka_compile.runtime import Runtime

FP8 = Choice("torch:rowwise", "torch", "rowwise", source="emulated")
OPTIONS = {"inner": "eager", "emulate": True, "mods": "off", "recipes": ["rowwise"],
           "libraries": ["torch"], "heads": ()}  # fmt: skip


def forward(self, x):
    return self.b(self.a(x).relu())


def model_of_its_own() -> nn.Module:
    body = types.FunctionType(forward.__code__.replace(), forward.__globals__)
    torch.manual_seed(0)
    model = type("Net", (nn.Module,), {"forward": body})()
    model.a, model.b = nn.Linear(32, 64), nn.Linear(64, 32)
    return model


class Rank:
    def __init__(self, store, number: int, size: int, plan: Plan | None) -> None:
        self.number, self.world = number, World(store, number, size)
        self.failed: dict = {}
        self.shared: set = set()
        self.board = Board(demotion._heard, lambda: [(*k, w) for k, w in self.failed.items()])
        self.model = model_of_its_own()
        options = {**OPTIONS, "plan": plan} if plan is not None else OPTIONS
        self.run = torch.compile(self.model, backend=loka_backend, options=options, dynamic=False)
        self.objections: list = []
        #: Of each call: kind, and the kernels that ran.
        self.ran: list[tuple[str, tuple]] = []


class Process:
    """Which rank this process is at present."""

    def __init__(self, monkeypatch, size: int, plans=None, apart: int = 2) -> None:
        self.store = dist.HashStore()
        self.ranks = [Rank(self.store, r, size, plans[r] if plans else None) for r in range(size)]
        self.apart, self.patch, self.here = apart, monkeypatch, self.ranks[0]
        monkeypatch.setattr(failure_board, "EVERY", 0.0)
        monkeypatch.setattr(failure_board, "PENDING", set())
        # A hook would belong to all of them.
        monkeypatch.setattr(failure_board, "register_optimizer_step_post_hook", lambda _: None)
        for module in (agreement, failure_board):
            monkeypatch.setattr(module, "world", lambda: self.here.world)
        to_plan = objections.to_plan
        monkeypatch.setattr(
            objections, "to_plan", lambda *args: self.here.objections or to_plan(*args)
        )
        run, process = Runtime._run, self

        def recorded(runtime, binding, built, args, states):
            kind = "train" if runtime.source.training else "eval"
            process.here.ran.append((kind, built.decided.kernels))
            return run(runtime, binding, built, args, states)

        monkeypatch.setattr(Runtime, "_run", recorded)

    def be(self, rank: Rank) -> Rank:
        self.here = rank
        self.patch.setattr(demotion, "_FAILED", rank.failed)
        self.patch.setattr(demotion, "_SHARED", rank.shared)
        self.patch.setattr(demotion, "BOARD", rank.board)
        return rank

    def step(self, rank: Rank, kind: str, rows: int) -> None:
        self.be(rank)
        if kind == "eval":
            with torch.no_grad():
                rank.run(torch.randn(rows, 32))
        else:
            rank.run(torch.randn(rows, 32)).sum().backward()
            # As torch.optim would, at the end of a step.
            rank.board.look_if_due()

    def play(self, program, draw: random.Random, disturb) -> None:
        """Every rank runs `program`; disturb(rank, step) comes before each of its steps."""
        at = [0] * len(self.ranks)
        while min(at) < len(program):
            open_ = [r for r in range(len(at)) if at[r] < min(len(program), min(at) + self.apart)]
            r = draw.choice(open_)
            disturb(self.be(self.ranks[r]), at[r])
            # Batches of two sizes, to each rank its own: two graphs of the same parameters.
            rows = draw.choice([16, 16, 16, 24]) if at[r] else 16
            self.step(self.ranks[r], program[at[r]], rows)
            at[r] += 1


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def given() -> Plan:
    directions = dict.fromkeys(("fwd", "dgrad", "wgrad"), FP8)
    shapes = {"a": (32, 64), "b": (64, 32)}
    return Plan(sites={n: SitePlan(n, 16, *kn, "float32", directions=directions)
                       for n, kn in shapes.items()})  # fmt: skip


def program_of(draw: random.Random, steps: int) -> list[str]:
    return ["train", *draw.choices(["train", "eval"], [5, 1], k=steps)]


@pytest.mark.parametrize("seed", range(4))
def test_every_call_runs_the_same_kernels_on_all_ranks(monkeypatch, seed: int) -> None:
    draw = random.Random(seed)
    plans = [given()] * 3 if seed % 3 == 2 else None
    process = Process(monkeypatch, draw.randint(2, 3), plans, draw.choice([1, 2, 5]))
    if seed % 2:
        process.ranks[-1].objections = [("a", "fwd", "not here")]
    touches = draw.choice([0.0, 0.5])

    def disturb(rank: Rank, step: int) -> None:
        if draw.random() < touches:
            LEDGER.touch()

    process.play(program_of(draw, 36), draw, disturb)
    first, *others = (rank.ran for rank in process.ranks)
    for other in others:
        assert first == other
    last = [k for kind, k in first if kind == "train"][-1]
    assert last and (dict(last)["a"][0] == "high_precision") == bool(seed % 2)
    digests = {loka_compile.plan_of(rank.model).digest() for rank in process.ranks}
    assert len(digests) == 1


@pytest.mark.parametrize("seed", range(2))
def test_after_a_failure_all_end_with_the_same_kernels(monkeypatch, seed: int) -> None:
    draw = random.Random(seed)
    process = Process(monkeypatch, 3, None, draw.choice([1, 3]))
    failures = {
        (draw.randrange(3), draw.randrange(30)): (d, k)
        for d, k in (("fwd", (32, 64)), ("wgrad", (64, 32)))
    }

    def disturb(rank: Rank, step: int) -> None:
        failure = failures.get((rank.number, step))
        if failure is not None:
            direction, shape = failure
            demotion._hold("torch:rowwise", direction, *shape, "broken")
            LEDGER.touch()

    process.play(program_of(draw, 40), draw, disturb)
    first, *others = (rank.ran[-1] for rank in process.ranks)
    assert all(first == other for other in others)
    kernels = {n: dict(rank_kernels(rank))[n] for rank in process.ranks for n in ("a", "b")}
    assert kernels["a"][0] == kernels["b"][2] == "high_precision"
    assert kernels["a"][2].startswith("torch:rowwise")


def rank_kernels(rank: Rank) -> list[tuple[str, tuple[str, ...]]]:
    plan = loka_compile.plan_of(rank.model)
    return [(name, site.kernels) for name, site in plan.sites.items()]
