"""`loka_compile.calibrate`: the Probe for models that are only served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import loka_compile
from loka_compile import loka_backend
from loka_compile.calibration import NothingCalibratedError
from loka_compile.ledger import LEDGER
from loka_compile.probe import saver

OPTIONS = {"emulate": True, "mods": "off", "libraries": ["torch"], "recipes": ["rowwise"]}


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 48))
        self.head = nn.Linear(48, 1)

    def forward(self, x, bias=None):
        y = self.head(self.body(x))
        return y if bias is None else y + bias


def batches(count: int = 8) -> list[torch.Tensor]:
    return [torch.randn(40, 32) for _ in range(count)]


def test_a_plain_model_gets_a_forward_plan_that_serves() -> None:
    torch._dynamo.reset()
    model = Ranker().train()
    data = batches()
    plan = loka_compile.calibrate(model, data, options=OPTIONS)
    assert set(plan.sites) == {"body.0", "body.3"} and not plan.mods and plan.emulated
    for site in plan.sites.values():
        assert site.kernels == ("torch:rowwise", "high_precision", "high_precision")
        assert site.choice("fwd").mere_clamped < 0.2
        assert "without gradients" in site.choice("wgrad").reason
    assert model.training and model.body[2].training
    assert all(p.grad is None for p in model.parameters())
    held = LEDGER.find(model.body[0].weight).statistics
    assert set(held) == {(0, "x")} and held[0, "x"].batches == 8
    torch.testing.assert_close(held[0, "x"].mean(), torch.cat(data).double().mean(0))
    found = loka_compile.quantify(model, kernels=["torch:rowwise"], models=["reservoir"])
    assert {(r["site"], r["direction"]) for r in found.rows} == {
        ("body.0", "fwd"),
        ("body.3", "fwd"),
    }
    # Dropout was off: half of the hidden values are zero, not three quarters.
    assert (
        0.4 < float(LEDGER.find(model.body[3].weight).statistics[0, "x"].zero_share().mean()) < 0.6
    )
    model.eval()
    run = torch.compile(
        model, backend=loka_backend, options={**OPTIONS, "plan": plan, "inner": "aot_eager"}
    )
    with torch.no_grad(), loka_compile.explain() as report:
        got, want = run(data[0]), model(data[0])
    assert "2 with FP8" in report.text()
    assert 0 < (got - want).norm() < 0.1 * want.norm()


def test_a_compiled_model_and_other_batches() -> None:
    """Its own code stays; keyword batches and changing sizes are fine."""
    torch._dynamo.reset()
    model = Ranker().eval()
    options = {**OPTIONS, "inner": "aot_eager"}
    run = torch.compile(model, backend=loka_backend, options=options)
    x = torch.randn(40, 32)
    with torch.no_grad():
        before = run(x)
    data = [{"x": torch.randn(m, 32), "bias": torch.zeros(m, 1)} for m in (40, 17, 40, 8)]
    plan = loka_compile.calibrate(run, data, options=OPTIONS)
    assert plan.sites["body.0"].choice("fwd").is_fp8
    assert LEDGER.find(model.body[0].weight).statistics[0, "x"].summary()["rows"] == 105
    with torch.no_grad():
        torch.testing.assert_close(run(x), before, rtol=0, atol=0)
    # In place, too: what `module.compile()` set is back afterwards.
    model.compile(backend="eager")
    call = model._compiled_call_impl
    loka_compile.calibrate(model, [(x,), [x]], options=OPTIONS)
    assert model._compiled_call_impl is call


def test_a_later_training_starts_anew() -> None:
    """Rows without gradients must not be paired with gradients of other rows."""
    torch._dynamo.reset()
    model = Ranker()
    loka_compile.calibrate(model, batches(3), options=OPTIONS)
    run = torch.compile(model, backend=loka_backend, options={**OPTIONS, "inner": "eager"})
    for x in batches(9):
        run(x).square().mean().backward()
    held = LEDGER.find(model.body[0].weight).statistics
    assert held[0, "x"].batches == held[0, "g"].batches == 8
    assert loka_compile.plan_of(model).sites["body.0"].choice("wgrad").is_fp8


def test_state_goes_to_the_probe_dir(tmp_path: Path) -> None:
    torch._dynamo.reset()
    loka_compile.calibrate(Ranker(), batches(2), options={**OPTIONS, "probe_dir": tmp_path})
    loaded = saver.load_folder(tmp_path)
    assert loaded.statistics["body.0", "x"].batches == 2 and "body.0" in loaded.weights
    assert not loaded.statistics["body.0", "x"].drawn().shape[0]
    from loka_compile.probe import session as module

    module._SESSIONS.pop(tmp_path.absolute())


def test_a_budget_needs_a_backward() -> None:
    torch._dynamo.reset()
    plan = loka_compile.calibrate(Ranker(), batches(2), options={**OPTIONS, "gate": "budget"})
    choice = plan.sites["body.0"].choice("fwd")
    assert not choice.is_fp8 and "needs a backward" in choice.reason


def test_nothing_to_calibrate_is_an_error() -> None:
    torch._dynamo.reset()
    with pytest.raises(NothingCalibratedError, match="batches"):
        loka_compile.calibrate(Ranker(), [], options=OPTIONS)
    with pytest.raises(NothingCalibratedError):
        loka_compile.calibrate(nn.ReLU(), batches(1))
