"""What training programs do around a compiled model: it must run on, and the plan must be true."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import loka_compile
from loka_compile import _compat
from loka_compile import loka_backend
from loka_compile import variant

FP8 = {
    "inner": "aot_eager",
    "mods": "off",
    "emulate": True,
    "recipes": ["rowwise"],
    "libraries": ["torch"],
}


class Towers(nn.Module):
    """A trunk and two tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(32, 64)
        self.click = nn.Linear(64, 32)
        self.buy = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.silu(self.trunk(x))
        return self.click(h), self.buy(h)


def compile_(model: nn.Module, options: dict):
    torch._dynamo.reset()
    return torch.compile(model, backend=loka_backend, options=options)


def test_a_task_without_a_loss_yet_shows_no_error() -> None:
    model = Towers()
    compiled = compile_(model, FP8)
    for _ in range(10):
        compiled(torch.randn(32, 32))[0].square().mean().backward()
    sites = loka_compile.plan_of(model).sites
    assert sites["trunk"].choice("dgrad").is_fp8 and sites["click"].choice("fwd").is_fp8
    assert not any(c.is_fp8 for c in sites["buy"].directions.values())
    assert "gradient was zero" in sites["buy"].choice("wgrad").reason


@pytest.fixture
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_float64_by_default(float64_by_default: None) -> None:
    """Of the process, while a model computes in float32."""
    model = Towers().float()
    compiled = compile_(model, FP8)
    for _ in range(10):
        x = torch.randn(32, 32, dtype=torch.float32)
        got, want = compiled(x), model(x)
        sum(y.square().mean() for y in got).backward()
    assert loka_compile.plan_of(model).active
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32 and (a - b).norm() <= 0.15 * b.norm()


def test_a_float64_model_is_left_alone() -> None:
    model = Towers().double()
    with loka_compile.explain() as report:
        compiled = compile_(model, {**FP8, "force": {"trunk": "torch:rowwise"}})
        for _ in range(10):
            x = torch.randn(32, 32, dtype=torch.float64)
            got, want = compiled(x), model(x)
            sum(y.square().mean() for y in got).backward()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert "float64" in report.why("trunk")


def test_float64_weights_under_a_cast_are_probed() -> None:
    weight = nn.Parameter(torch.randn(64, 32, dtype=torch.float64))
    compiled = compile_(lambda x: F.linear(x, weight.float()), FP8)
    for _ in range(10):
        compiled(torch.randn(32, 32)).square().mean().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float64


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_of_the_step_see_nothing_of_a_late_compile() -> None:
    """Selective checkpoints keep what passes through theirs, for the backward to find."""
    with Seen() as seen:
        with _compat.late_compile(None):
            torch.ones(2) + 1
        assert not seen.ops
        torch.ones(2)
        assert seen.ops


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.a(x))


@pytest.mark.parametrize(("option", "out"), [("exclude", "2"), ("heads", "2"), ("exclude", "1")])
def test_options_reach_layers_that_share_a_graph(
    option: str, out: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks 1 and 2 share a graph that is named after block 1; the input of 0 has no gradient."""
    torch._dynamo.reset()
    blocks = loka_compile.name_layers(nn.Sequential(*[Block() for _ in range(3)]))
    for block in blocks:
        block.compile(backend=loka_backend, options={**FP8, option: [f"{out}.*"]})
    for _ in range(11):
        h = before = blocks[0](torch.randn(32, 32))
        for block in blocks[1:]:
            before, h = h, block(h)
        h.square().mean().backward()
    sites = loka_compile.plan_of(blocks).sites
    assert sites["0.a"].choice("fwd").is_fp8
    # Where layers that share a graph differ, all of them run in high precision.
    want = F.silu(F.linear(before, blocks[2].a.weight, blocks[2].a.bias))
    torch.testing.assert_close(h, want)
    if out == "1":
        assert "2.a shares its graph with 1.a" in caplog.text
    else:
        assert sites["2.a"].choice("fwd").reason.startswith(("excluded", "a head"))


def test_a_model_that_changes_its_dtype_keeps_its_plan_which_says_so() -> None:
    model = Towers()
    compiled = compile_(model, FP8)
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        for _ in range(10 if dtype == torch.float32 else 1):
            model.zero_grad()
            x = torch.randn(32, 32, dtype=dtype)
            got, want = compiled(x), model(x)
            sum(y.float().square().mean() for y in got).backward()
        plan = loka_compile.plan_of(model)
        assert {s.dtype for s in plan.sites.values()} == {str(dtype).removeprefix("torch.")}
        assert all(s.choice("fwd").is_fp8 for s in plan.sites.values())
        for a, b in zip(got, want, strict=True):
            assert a.dtype == dtype and (a - b).norm() <= 0.15 * b.norm()


@pytest.mark.parametrize("program", ["keeps its losses", "runs the next batch first"])
def test_a_backward_that_is_always_to_come_does_not_keep_the_plan_away(program: str) -> None:
    model = Towers()
    compiled = compile_(model, FP8)
    kept: list[torch.Tensor] = []
    waiting: torch.Tensor | None = None
    for _ in range(20):
        loss = sum(y.square().mean() for y in compiled(torch.randn(32, 32)))
        if program == "keeps its losses":
            kept.append(loss)
            sum(y.square().mean() for y in compiled(torch.randn(32, 32))).backward()
        else:
            if waiting is not None:
                waiting.backward()
            waiting = loss
    plan = loka_compile.plan_of(model)
    assert plan.active and all(c.is_fp8 for s in plan.sites.values() for c in s.directions.values())


@pytest.mark.parametrize("chain", [True, False])
def test_a_kernel_of_chains_that_is_forced_is_claimed_where_it_runs(chain: bool) -> None:
    after = nn.ReLU() if chain else nn.Softmax(-1)
    model = nn.Sequential(nn.Linear(32, 64), after, nn.Linear(64, 32))
    options = {**FP8, "recipes": None, "libraries": None, "force": {"0": "loka:blockwise"}}
    with loka_compile.explain() as report:
        compiled = compile_(model, {**options, "exclude": ["2"]})
        x = torch.randn(32, 32)
        got, want = compiled(x), model(x)
    choice = loka_compile.plan_of(model).sites["0"].choice("fwd")
    assert choice.is_fp8 == chain == (not torch.equal(got, want))
    assert chain or (
        "not part of a fused chain" in choice.reason and choice.reason in report.why("0")
    )


def test_a_variant_that_does_not_compile_is_not_reported_as_fp8(monkeypatch, caplog) -> None:
    build = variant.build

    def late(source, decided, options, *, inputs=None):
        if inputs is None and decided.kernels:
            raise RuntimeError("no code for these")
        return build(source, decided, options, inputs=inputs)

    monkeypatch.setattr(variant, "build", late)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    compiled = compile_(model, {**FP8, "tune": "never", "min_speedup": 0.0, "heads": ()})
    with loka_compile.explain(model) as report:
        for _ in range(11):
            compiled(torch.randn(32, 64)).sum().backward()
    why = "no variant with FP8 compiles here: RuntimeError: no code for these"
    assert f"do not run here: {why}\n" in caplog.text
    choices = [c for site in report.sites for c in site["directions"].values()]
    assert {c["kernel"] for c in choices} == {"high_precision"}
    # A direction that the plan itself kept in high precision has its own reason.
    assert len([c for c in choices if c["reason"] == why]) >= 4


def test_a_functorch_transform_says_why_its_graph_stays_as_written() -> None:
    """Spelt as no other graph is: F.linear without a third argument."""

    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.randn(3, 64, 64) * 0.1)
            self.head = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            each = torch.vmap(lambda w: F.linear(x, w))(self.weights)
            return self.head(each.mean(0))

    torch.manual_seed(0)
    model = Ensemble()
    compiled = compile_(model, {**FP8, "tune": "never", "min_speedup": 0.0})
    with loka_compile.explain(model) as report:
        for _ in range(11):
            x = torch.randn(32, 64)
            torch.testing.assert_close(compiled(x), model(x))
            compiled(x).sum().backward()
    assert not loka_compile.plan_of(model).sites
    assert "functorch transform" in report.why("head") and "probing" not in report.why("head")
