"""How long things live and when they may change: probe state, variants, swaps, refusals."""

from __future__ import annotations

import gc
import itertools
import logging
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import loka_compile
from loka_compile import loka_backend
from loka_compile import planner
from loka_compile import variant
from loka_compile.ledger import LEDGER
from loka_compile.ledger import Ledger

QUICK = {"inner": "aot_eager", "mods": "off"}
FP8 = {**QUICK, "emulate": True, "recipes": ["rowwise"], "libraries": ["torch"]}


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, width), nn.Linear(width, 32)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)).relu())


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)


def compile_(model: nn.Module, options: dict = FP8):
    return torch.compile(model, backend=loka_backend, options=options)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(32, 32)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list:
    """One entry per compiled variant: True for a late one."""
    done, build = [], variant.build

    def counted(source, decided, options, *, inputs=None):
        done.append(inputs is None)
        return build(source, decided, options, inputs=inputs)

    monkeypatch.setattr(variant, "build", counted)
    return done


def is_right(model: nn.Module, compiled, x: torch.Tensor, allowed: float = 1e-5) -> None:
    want = model(x)
    assert (compiled(x) - want).norm() <= allowed * want.norm()


# -- several forwards and one backward, several backwards and one forward -------------------------


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@torch._functorch.config.patch(donated_buffer=False)
def test_two_forwards_before_one_backward_while_probing(inner: str, x: torch.Tensor) -> None:
    model = Net() if inner == "aot_eager" else One()
    compiled = compile_(model, {**FP8, "inner": inner})
    for _ in range(3):
        (compiled(x) * compiled(-x)).sum().backward()
    assert not loka_compile.plan_of(model).active
    model.zero_grad()
    y = compiled(x).sum()
    y.backward(retain_graph=True)
    first = model.a.weight.grad.clone()
    y.backward()
    torch.testing.assert_close(model.a.weight.grad, 2 * first, rtol=1e-3, atol=1e-3)


def test_accumulated_gradients(x: torch.Tensor) -> None:
    model = Net()
    compiled = compile_(model)
    parts = [torch.randn(32, 32) for _ in range(4)]
    for _ in range(3):
        model.zero_grad()
        sum(compiled(part).square().sum() for part in parts).backward()
    got = model.a.weight.grad.clone()
    model.zero_grad()
    sum(model(part).square().sum() for part in parts).backward()
    assert loka_compile.plan_of(model).active
    assert (got - model.a.weight.grad).norm() < 0.3 * got.norm()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("calls", [1, 3])
def test_checkpoint_around_the_compiled_model(reentrant: bool, calls: int) -> None:
    """The plan is swapped in between no forward and its recomputation."""
    model = Net()
    compiled = compile_(model)
    x = torch.randn(32, 32, requires_grad=True)
    for _ in range(11):
        model.zero_grad()
        ys = [checkpoint(compiled, x * k, use_reentrant=reentrant) for k in range(1, calls + 1)]
        sum(y.square().mean() for y in ys).backward()
    assert loka_compile.plan_of(model).active
    is_right(model, compiled, x, 0.15)


def test_a_loss_that_reads_the_second_output_only(x: torch.Tensor) -> None:
    """Dict and None outputs, and a first output that no gradient reaches."""

    class Two(Net):
        def forward(self, x: torch.Tensor) -> dict:
            h = self.a(x)
            return {"aux": h, "none": None, "n": 3, "out": self.b(self.norm(h.detach()))}

    model = Two()
    compiled = compile_(model)
    for _ in range(10):
        out = compiled(x)
        assert out["none"] is None and out["n"] == 3
        out["out"].sum().backward()
    assert not model.a.weight.grad.any() and loka_compile.plan_of(model).active


# -- lifetimes ------------------------------------------------------------------------------------


def test_fresh_models_leave_nothing_behind(builds: list) -> None:
    gc.collect()
    before, watched = len(LEDGER._entries), []
    for index in range(30):
        model = Net()
        compiled = compile_(model)
        for _ in range(10 if index % 10 == 0 else 2):
            compiled(torch.randn(32, 32)).sum().backward()
        entry = LEDGER.find(model.a.weight)
        watched += [weakref.ref(model.a.weight), weakref.ref(entry.statistics[(0, "x")])]
        del model, compiled, entry
    gc.collect()
    assert len(LEDGER._entries) <= before
    assert not any(ref() is not None for ref in watched)
    assert len(builds) <= 8, "one observed variant, and a swap to and fro for each model planned"


def test_a_recycled_id_inherits_nothing() -> None:
    ledger = Ledger()
    first = nn.Parameter(torch.zeros(2))
    ledger.entry(first).mods = True
    key = id(first)
    del first
    assert key not in ledger._entries and ledger.version == 1
    second = nn.Parameter(torch.zeros(2))
    ledger._entries[id(second)] = stale = ledger.entry(nn.Parameter(torch.zeros(2)))
    assert ledger.find(second) is None and ledger.entry(second) is not stale


def test_models_of_one_class_at_different_stages_do_not_compile_in_turns(
    builds: list, x: torch.Tensor
) -> None:
    a, b = Net(), Net()
    run_a, run_b = compile_(a), compile_(b)
    for _ in range(10):
        run_a(x).sum().backward()
    for _ in range(6):
        run_b(x).sum().backward()
        run_a(x).sum().backward()
        LEDGER.touch()
    assert builds == [False, True, True] or builds == [False, True]


def test_a_second_model_is_told_about_its_mods(
    x: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """Ids are recycled: what was said about a dead model does not silence a new one."""
    for _ in range(4):
        model = Net()
        compile_(model, {"inner": "aot_eager", "mods": "on"})(x).sum().backward()
        del model
        gc.collect()
    assert sum("Mods are ON" in r.getMessage() for r in caplog.records) == 4


# -- what fails late ------------------------------------------------------------------------------


class BranchesOnTheBatch:
    """A user's pass that adds a guard on the batch size, but only to a late variant."""

    name = "branches_on_the_batch"
    late = False

    def __call__(self, gm, context) -> None:
        first = next(n for n in gm.graph.nodes if n.op == "placeholder" and "x" in n.name)
        if BranchesOnTheBatch.late:
            assert first.meta["example_value"].shape[0] % 16 == 0


def test_a_late_variant_that_adds_guards_is_refused(
    monkeypatch: pytest.MonkeyPatch, builds: list, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    options = {**FP8, "patterns": [BranchesOnTheBatch()]}
    compiled = torch.compile(model, backend=loka_backend, options=options, dynamic=True)
    compiled(torch.randn(16, 32))
    monkeypatch.setattr(BranchesOnTheBatch, "late", True)
    for step in range(12):
        is_right(model, compiled, torch.randn(16 * (1 + step % 3), 32))
        compiled(torch.randn(32, 32)).square().sum().backward()
    is_right(model, compiled, torch.randn(17, 32))
    assert "added 1 shape guards" in caplog.text
    assert builds.count(True) <= 3, "a refused variant is not tried at every step"
    refused = [r for r in caplog.records if "refused" in r.getMessage()]
    assert refused and len(refused) <= 3


def test_nothing_compiles_late(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor) -> None:
    """The Mods go off for a checkpoint loaded late, and no other variant compiles: still right."""
    model = Net()
    compiled = compile_(model, {"inner": "aot_eager"})
    compiled(x)

    def refuse(*args, **kwargs):
        raise variant.GuardsAddedError("planted")

    monkeypatch.setattr(variant, "build", refuse)
    with torch.no_grad():
        model.norm.weight.mul_(2)
    is_right(model, compiled, x)
    compiled(x).sum().backward()
    assert model.a.bias.grad.any()


def test_a_site_that_cannot_be_quantified_stays_high(
    monkeypatch: pytest.MonkeyPatch, x: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args):
        raise RuntimeError("planted")

    monkeypatch.setattr(planner, "quantify", broken)
    model = Net()
    compiled = compile_(model)
    with loka_compile.explain() as report, caplog.at_level(logging.WARNING, "loka_compile"):
        for _ in range(12):
            compiled(x).square().sum().backward()
    is_right(model, compiled, x)
    assert "could not be quantified" in report.sites[0]["directions"]["fwd"]["reason"]
    assert sum("planted" in r.getMessage() for r in caplog.records) == 2


def test_losses_with_a_scaler_and_two_optimizers(x: torch.Tensor) -> None:
    """Overflowing FP16 gradients while probing, and after the swap."""
    model = Net()
    compiled = compile_(model, {**FP8, "mods": "on"})
    optimizers = [torch.optim.Adam(p.parameters(), 1e-2) for p in (model.a, model.b)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    losses = []
    for _ in range(30):
        with torch.autocast("cpu", torch.float16):
            y = compiled(x)
        losses.append((y.float() - x[:, :1]).square().mean())
        scaler.scale(losses[-1]).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    assert all(b <= a * 1.5 for a, b in itertools.pairwise(losses)) and losses[-1] < losses[0]
