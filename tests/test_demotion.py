"""A kernel that fails while a step runs: the step is run again, the kernel is not used any more."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loka_compile import demotion
from loka_compile import explain
from loka_compile import plan_of
from loka_compile.lowering import first_use
from loka_compile.lowering import gemm
from loka_compile.lowering.libraries.torch_scaled_mm import TorchScaledMM

OPTIONS = {
    "emulate": True, "mods": "off", "inner": "eager", "force": {"0": "torch:rowwise"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(demotion, "_FAILED", {})


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
    assert len(calls) == 1
    site = plan_of(model).sites["0"]
    assert not site.choice("fwd").is_fp8 and site.choice("dgrad").is_fp8
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in site.choice("fwd").reason
    assert site.choice("fwd").source == "demoted"
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in caplog.text and "CUBLAS" in report.text()


def test_a_pinned_plan_is_read_without_the_failed_kernel(monkeypatch):
    model, x = _model(), torch.randn(16, 32)
    torch.compile(model, backend="loka", options=OPTIONS)(x)
    plan = plan_of(model)
    demotion.demote([plan.sites["0"]], "fwd", RuntimeError("gone"))
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
