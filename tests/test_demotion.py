"""A kernel that fails while a step runs: the step runs again, the kernel is not used any more."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from loka_compile import _compat
from loka_compile import demotion
from loka_compile import explain
from loka_compile import plan_of
from loka_compile.lowering import first_use
from loka_compile.lowering import gemm
from loka_compile.lowering.libraries import LIBRARIES
from loka_compile.lowering.libraries import opaque
from loka_compile.lowering.libraries.base import Library
from loka_compile.lowering.libraries.torch_scaled_mm import TorchScaledMM
from loka_compile.lowering.recipes import ROWWISE
from loka_compile.recovery import Step
from loka_compile.runtime import Runtime

OPTIONS = {
    "emulate": True, "mods": "off", "inner": "eager", "force": {"0": "torch:rowwise"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(demotion, "_FAILED", {})
    monkeypatch.setattr(demotion, "_SHARED", set())


def _model(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64, bias), nn.ReLU(), nn.Linear(64, 48, bias))


def test_a_failed_step_is_run_again_in_high_precision(monkeypatch, caplog):
    model, x = _model(), torch.randn(16, 32)
    with explain() as report:
        compiled = torch.compile(model, backend="loka", options=OPTIONS)
        assert not torch.equal(compiled(x), model(x))
        assert plan_of(model).sites["0"].choice("fwd").is_fp8
        calls = []
        scaled = gemm._scaled

        def broken(a, b, direction, *rest):
            if direction == "fwd":
                calls.append(1)
                raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
            return scaled(a, b, direction, *rest)

        monkeypatch.setattr(gemm, "_scaled", broken)
        for _ in range(3):
            y = compiled(x)
            torch.testing.assert_close(y, model(x))
            y.sum().backward()
    # Once in the step, and once more alone, to see whether it is to blame.
    assert len(calls) == 2
    site = plan_of(model).sites["0"]
    assert not site.choice("fwd").is_fp8 and site.choice("dgrad").is_fp8
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in site.choice("fwd").reason
    assert site.choice("fwd").source == "demoted"
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in caplog.text and "CUBLAS" in report.text()


def test_a_pinned_plan_is_read_without_the_failed_kernel(monkeypatch):
    model, x = _model(), torch.randn(16, 32)
    torch.compile(model, backend="loka", options=OPTIONS)(x)
    plan = plan_of(model)
    demotion.demote([(plan.sites["0"], "fwd")], RuntimeError("gone"))
    torch._dynamo.reset()
    other = _model()
    options = {**OPTIONS, "force": {}, "plan": plan}
    compiled = torch.compile(other, backend="loka", options=options)
    torch.testing.assert_close(compiled(x), other(x))
    assert "gone" in plan_of(other).sites["0"].choice("fwd").reason


def test_what_fails_in_high_precision_too_is_the_callers(monkeypatch):
    model, x = _model(bias=False), torch.randn(16, 32)
    compiled = torch.compile(model, backend="loka", options=OPTIONS)
    compiled(x)

    def broken(*_, **__):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(gemm, "forward", broken)
    with pytest.raises(RuntimeError, match="the device is lost"):
        compiled(x)
    assert not demotion._FAILED


def test_a_kernel_that_fails_its_first_use_is_not_chosen(monkeypatch, tmp_path):
    """Real kernels on this CPU; one is wrong for weights' gradients, as libraries have been."""
    monkeypatch.setenv("LOKA_CACHE", str(tmp_path))
    first_use.forget()
    for what, value in (("why_unavailable", None), ("why_no_recipe", None)):
        monkeypatch.setattr(TorchScaledMM, what, lambda *_, v=value: v)
    real, runs = first_use.run_and_compare, []

    def run(kernel, direction, *rest):
        runs.append((kernel, direction))
        why = real(kernel, direction, *rest)
        return "differs from the dequantised product" if direction == "wgrad" else why

    monkeypatch.setattr(first_use, "run_and_compare", run)
    monkeypatch.setattr(first_use, "is_odd", lambda shape: False)
    options = {
        "inner": "eager", "mods": "off", "heads": (), "min_speedup": 0, "libraries": ["torch"],
        "recipes": ["tensorwise"], "tune": "never",
    }  # fmt: skip
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).bfloat16()
    with explain() as report:
        compiled = torch.compile(model, backend="loka", options=options)
        for _ in range(10):
            compiled(torch.randn(64, 32).bfloat16()).sum().backward()
    site = plan_of(model).sites["0"]
    assert site.choice("fwd").kernel == site.choice("dgrad").kernel == "torch:tensorwise"
    assert not site.choice("wgrad").is_fp8
    assert "torch:tensorwise: differs from the dequantised" in site.choice("wgrad").reason
    assert "0 wgrad: torch:tensorwise may not be chosen" in report.text()
    assert len(runs) == len(set(runs)) * 2 == 6
    first_use.forget()


@pytest.fixture
def broken(monkeypatch):
    """Kernels of one direction, and of one shape where it is given, raise from now on."""

    def break_(direction, error=None, features=None):
        calls, scaled = [], gemm._scaled

        def run(a, b, which, *rest):
            if which == direction and features in (None, a.shape[0], b.shape[0]):
                calls.append(which)
                raise error or RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
            return scaled(a, b, which, *rest)

        monkeypatch.setattr(gemm, "_scaled", run)
        return calls

    return break_


class StandIn(Library):
    """A library whose kernel is an opaque op: in compiled code, too, it can fail when it runs."""

    name = "standin"
    distribution = "torch"
    recipes = {"rowwise": ROWWISE}
    #: What raises in a backward: the sizes (rows of a, rows of b) or None for all; and the error.
    fails: tuple[tuple[int, int] | None, Exception] | None = None
    #: Its next forward raises, and those of the search for the guilty.
    fails_forward = 0
    calls = 0

    def why_unavailable(self, device):
        return None

    def call(self, a, a_scale, b, b_scale, gemm, out_dtype):
        return torch.ops.loka.test_standin(a, a_scale, b, b_scale, gemm.fast_accum, out_dtype)

    @classmethod
    def run(cls, a, a_scale, b, b_scale, forward, dtype):
        if forward and cls.fails_forward:
            cls.fails_forward -= 1
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        if cls.fails is not None and not forward:
            sizes, error = cls.fails
            if sizes in (None, (a.shape[0], b.shape[0])):
                cls.calls += 1
                raise error
        return ((a.float() * a_scale) @ (b.float() * b_scale).t()).to(dtype)


opaque.define(
    "test_standin", "bool forward, ScalarType dtype", StandIn.run, lambda forward, dtype: dtype
)


@pytest.fixture
def standin(monkeypatch):
    monkeypatch.setitem(LIBRARIES, "standin", StandIn())
    monkeypatch.setattr(StandIn, "fails", None)
    monkeypatch.setattr(StandIn, "calls", 0)
    return {"mods": "off", "inner": "aot_eager", "heads": (), "force": {"*": "standin:rowwise"}}


GONE = (None, RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED"))


def _gradients(function, model, x):
    model.zero_grad()
    x.grad = None
    y = function(x)
    y.square().sum().backward()
    return y.detach(), [p.grad.clone() for p in model.parameters()] + [x.grad.clone()]


@pytest.mark.parametrize("direction", ["dgrad", "wgrad"])
def test_a_backward_runs_again_in_place(direction, broken, caplog):
    model, x = _model(), torch.randn(16, 32, requires_grad=True)
    compiled = torch.compile(model, backend="loka", options=OPTIONS)
    compiled(x)
    calls = broken(direction)
    for _ in range(3):
        _, got = _gradients(compiled, model, x)
    _, want = _gradients(model, model, x)
    # What failed is exact, what did not has the error of FP8.
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() < 0.15 * b.norm()
    assert len(calls) == 1
    site = plan_of(model).sites["0"]
    assert not site.choice(direction).is_fp8 and site.choice(direction).source == "demoted"
    assert all(site.choice(d).is_fp8 for d in ("fwd", "dgrad", "wgrad") if d != direction)
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in site.choice(direction).reason
    assert f"failed in the {direction}" in caplog.text


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_backward_runs_again(inner, standin, monkeypatch, caplog):
    model, x = _model(), torch.randn(16, 32, requires_grad=True)
    compiled = torch.compile(model, backend="loka", options={**standin, "inner": inner})
    before, _ = _gradients(compiled, model, x)
    monkeypatch.setattr(StandIn, "fails", GONE)
    y, got = _gradients(compiled, model, x)
    assert StandIn.calls and torch.equal(y, before)
    # The gradient of high precision at the loss of the FP8 forward.
    model.zero_grad()
    z = x.detach().requires_grad_()
    model(z).backward(2 * y)
    want = [p.grad for p in model.parameters()] + [z.grad]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for site in plan_of(model).sites.values():
        assert site.choice("fwd").is_fp8
        for direction in ("dgrad", "wgrad"):
            assert site.choice(direction).source == "demoted"
            assert "CUBLAS_STATUS_NOT_SUPPORTED" in site.choice(direction).reason
    assert "backward kernel failed" in caplog.text
    calls = StandIn.calls
    _, got = _gradients(compiled, model, x)
    assert StandIn.calls == calls
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() < 0.1 * b.norm()


@pytest.mark.parametrize("fails", ["forward", "elsewhere"])
def test_a_second_forward_in_a_backward_runs_what_the_first_one_ran(fails, standin, monkeypatch):
    """Blocks that share a graph, a checkpoint around each; a kernel fails between two of them."""
    runs, run = [], Runtime._run

    def recorded(self, binding, built, args, states):
        try:
            return run(self, binding, built, args, states)
        finally:  # A checkpoint stops its second forward by an exception.
            runs.append((binding.key, _compat.in_backward(), binding.built.decided))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            return self.linear(x).relu()

    monkeypatch.setattr(Runtime, "_run", recorded)
    blocks = nn.ModuleList(Block() for _ in range(3))
    for block in blocks:
        block.compile(backend="loka", options=standin)
    for step in range(4):
        runs.clear()
        x = torch.randn(16, 32, requires_grad=True)
        for number, block in enumerate(blocks):
            if step == 2 and number == 1:
                if fails == "forward":
                    monkeypatch.setattr(StandIn, "fails_forward", 2)
                else:
                    demotion._heard(1, ("standin:rowwise", "fwd", 32, 32, "RuntimeError: lost"))
            x = checkpoint(block, x, use_reentrant=False)
        x.square().sum().backward()
        first = {key: decided for key, again, decided in runs if not again}
        second = {key: decided for key, again, decided in runs if again}
        assert first == second and len(first) == 3
        fp8 = [bool(d.kernels) and d.kernels[0][1][0] != "high_precision" for d in first.values()]
        assert fp8 == ([True, False, False] if step == 2 else [step < 2] * 3)


def test_only_the_guilty_kernel_is_given_up(standin, monkeypatch):
    """Run alone, one of four fails: the others stay."""
    model, x = _model(), torch.randn(16, 32, requires_grad=True)
    compiled = torch.compile(model, backend="loka", options=standin)
    _gradients(compiled, model, x)
    # The weight's gradient of the second layer.
    monkeypatch.setattr(StandIn, "fails", ((48, 64), RuntimeError("no workspace")))
    _gradients(compiled, model, x)
    sites = plan_of(model).sites
    high = [(n, d) for n, s in sites.items() for d, c in s.directions.items() if not c.is_fp8]
    assert high == [("2", "wgrad")]


def test_a_step_that_cannot_be_saved_raises_and_gives_the_kernel_up(standin, monkeypatch):
    model = _model()
    compiled = torch.compile(model, backend="loka", options=standin)
    # The input is gone by the time of the backward: its FP8 copy alone was kept, or nothing.
    loss = compiled(torch.randn(16, 32)).sum()
    monkeypatch.setattr(Step, "inputs", lambda self: None)
    monkeypatch.setattr(StandIn, "fails", GONE)
    with pytest.raises(RuntimeError, match="CUBLAS"):
        loss.backward()
    assert "CUBLAS" in plan_of(model).sites["0"].choice("wgrad").reason
    compiled(torch.randn(16, 32)).sum().backward()


def test_inputs_are_not_kept_alive_by_the_guard(standin):
    model, x = _model(), torch.randn(16, 32)
    compiled = torch.compile(model, backend="loka", options=standin)
    y = compiled(x)
    step = y.grad_fn.loka_step
    assert [a is b for a, b in zip(step.inputs(), [*model.parameters(), x], strict=False)]
    passing = [one for one in step.held if isinstance(one, weakref.ref)]
    assert [one() is x for one in passing] == [True]


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_memory_and_mistakes_in_a_backward_are_not_a_kernels(inner, standin, monkeypatch):
    model, x = _model(), torch.randn(16, 32)
    compiled = torch.compile(model, backend="loka", options={**standin, "inner": inner})
    compiled(x).sum().backward()
    monkeypatch.setattr(StandIn, "fails", (None, torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        compiled(x).sum().backward()
    assert not demotion._FAILED and plan_of(model).sites["0"].choice("wgrad").is_fp8


def test_a_second_backward_is_the_callers_mistake(standin):
    """Of plain compiled code, too: it uses up what its forward saved."""
    model, x = _model(), torch.randn(16, 32)
    compiled = torch.compile(model, backend="loka", options={**standin, "inner": "aot_eager"})
    compiled(x).sum().backward()
    with pytest.raises(RuntimeError, match="donated buffers"):
        compiled(x).sum().backward(retain_graph=True)
    y = compiled(x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        y.backward()
    assert not demotion._FAILED and plan_of(model).sites["0"].choice("wgrad").is_fp8


def test_running_statistics_move_once_and_casts_are_made_again(standin, monkeypatch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 64, bias=False), nn.Linear(64, 48)
            self.norm = nn.BatchNorm1d(64)

        def forward(self, x):
            return self.b(self.norm(self.a(x)).relu())

    model, x = Net(), torch.randn(16, 32, requires_grad=True)
    compiled = torch.compile(model, backend="loka", options=standin)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return compiled(x)

    _, fp8 = _gradients(run, model, x)
    moved = model.norm.running_mean.clone()
    monkeypatch.setattr(StandIn, "fails", GONE)
    try:
        _, got = _gradients(run, model, x)
    except RuntimeError as error:
        # The compiled graph returns the statistics too: the step is not saved, and says so.
        assert "CUBLAS" in str(error)
    else:
        for a, b in zip(got, fp8, strict=True):
            assert a.dtype == b.dtype and (a - b).norm() < 0.35 * b.norm()
    torch.testing.assert_close(model.norm.running_mean, 0.9 * moved + moved, rtol=1e-2, atol=1e-3)
    _gradients(run, model, x)


@pytest.mark.gpu
def test_a_compiled_backward_runs_again_on_a_gpu(standin, monkeypatch):
    """There the backward runs in a thread of autograd's own."""
    model, x = _model().cuda(), torch.randn(64, 32, device="cuda", requires_grad=True)
    compiled = torch.compile(model, backend="loka", options={**standin, "inner": "inductor"})
    _, before = _gradients(compiled, model, x)
    monkeypatch.setattr(StandIn, "fails", GONE)
    for _ in range(2):
        _, got = _gradients(compiled, model, x)
        for a, b in zip(got, before, strict=True):
            assert (a - b).norm() < 0.15 * b.norm()
    assert all(s.choice("wgrad").source == "demoted" for s in plan_of(model).sites.values())
