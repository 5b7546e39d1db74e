"""`loka plan`: made on a copy, shown, compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from loka_compile import explain
from loka_compile import make_plan
from loka_compile.cli import app
from loka_compile.dry_run import measure_step
from loka_compile.dry_run import predict
from loka_compile.mod_set import EVERY
from loka_compile.plan import Choice
from loka_compile.plan import Plan
from loka_compile.plan import SitePlan
from loka_compile.plan_diff import diff

RUNNER = CliRunner()
FAST = Choice("torch:rowwise", "torch", "rowwise", us=5.0, speedup=2.0, source="table")
SLOW = Choice(us=8.0, speedup=0.5, reason="torch:rowwise: speedup 0.50 < 1.05")
SITE = SitePlan("a", 64, 32, 48, "bfloat16", directions={"fwd": FAST, "dgrad": SLOW})
PLAN = Plan(sites={"a": SITE})


def test_a_plan_before_training_changes_nothing():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.SiLU(), nn.Linear(48, 64))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x = torch.randn(64, 32)
    state = torch.get_rng_state()
    plan = make_plan(model, x, options={"emulate": True, "mods": "on", "heads": ["3"]})
    assert torch.equal(state, torch.get_rng_state())
    assert plan.active and plan.mods and plan.sites["0"].choice("fwd").is_fp8
    assert (plan.sites["0"].M, plan.sites["0"].K, plan.sites["0"].N) == (64, 32, 48)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    from loka_compile import plan_of

    assert not plan_of(model).active
    # The same again: the same decisions.
    assert list(diff(plan, make_plan(model, x, options={
        "emulate": True, "mods": "on", "heads": ["3"]}))) == []  # fmt: skip


def test_the_predicted_gain_counts_what_has_a_price():
    predicted = predict(PLAN)
    # fwd 10 -> 5 us; dgrad stays at its 4 us in high precision; wgrad has no price.
    assert (predicted.high_us, predicted.planned_us, predicted.unpriced) == (14.0, 9.0, 1)
    assert predicted.speedup == pytest.approx(14 / 9)
    assert predict(Plan()).speedup is None


def test_the_gain_of_a_whole_step_counts_what_has_no_price():
    predicted = predict(PLAN, 20.0)
    assert predicted.planned_step_us == pytest.approx(20 - 14 + 9)
    assert predict(PLAN).planned_step_us is None and predict(Plan(), 20.0).planned_step_us is None
    # Kernels that overlap in the step: never less than the priced ones alone.
    assert predict(PLAN, 10.0).planned_step_us == pytest.approx(9)


def test_the_step_that_a_plan_improves_on():
    """A training step of a copy, Mods on, nothing in FP8."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.SiLU(), nn.Linear(48, 64))
    options = {"emulate": True, "mods": "on", "inner": "aot_eager"}
    with explain() as report:
        us = measure_step(model, torch.randn(64, 32), options=options, steps=3)
    assert us > 10  # a step takes longer than a clock's resolution, on any machine
    kernels = {c["kernel"] for s in report.sites for c in s["directions"].values()}
    assert kernels == {"high_precision"} and any(s["fused"] for s in report.sites)
    assert all(p.grad is None for p in model.parameters())


def test_a_model_of_the_zoo(tmp_path: Path):
    torch._dynamo.reset()
    out = tmp_path / "plan.json"
    arguments = ["plan", "make", "--model", "dlrm", "--batch", "32", "--device", "cpu"]
    got = RUNNER.invoke(app, [*arguments, "--out", str(out)])
    assert got.exit_code == 0, got.output
    assert "no direction has a price here" in got.output
    assert "bottom.0" in Plan.load(out).parameters
    both = RUNNER.invoke(app, ["plan", "make", "--model", "dlrm:tiny", "--scale", "base"])
    assert both.exit_code and "--scale says base" in both.output
    bad = RUNNER.invoke(app, ["plan", "make", "--model", "dlmr"])
    assert bad.exit_code == 2 and "dlrm" in bad.stderr


def test_diff_and_show(tmp_path: Path):
    a = PLAN.save(tmp_path / "a.json")
    other = replace(SITE, directions={**SITE.directions, "fwd": SLOW})
    b = Plan(sites={"a": other, "b": replace(SITE, name="b")}, mods=EVERY).save(tmp_path / "b.json")
    same = RUNNER.invoke(app, ["plan", "diff", str(a), str(a)])
    assert same.exit_code == 0 and "the same decisions" in same.output
    got = RUNNER.invoke(app, ["plan", "diff", str(a), str(b)])
    assert got.exit_code == 1
    assert "mods: off -> on" in got.output and "+ b:" in got.output
    assert "a fwd: torch:rowwise -> high_precision (torch:rowwise: speedup 0.50" in got.output
    assert "- b" in "\n".join(diff(Plan.load(b), Plan.load(a)))
    shown = RUNNER.invoke(app, ["plan", "show", str(a)])
    assert shown.exit_code == 0 and "1.56x" in shown.output
    bad = RUNNER.invoke(app, ["plan", "show", str(tmp_path / "none.json")])
    assert bad.exit_code == 2 and "no such file" in bad.stderr
