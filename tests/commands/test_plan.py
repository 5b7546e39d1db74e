"""`loka plan`: made on a copy, shown, compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from loka_compile import make_plan
from loka_compile.cli import app
from loka_compile.dry_run import predict
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


def test_diff_and_show(tmp_path: Path):
    a = PLAN.save(tmp_path / "a.json")
    other = replace(SITE, directions={**SITE.directions, "fwd": SLOW})
    b = Plan(sites={"a": other, "b": replace(SITE, name="b")}, mods=True).save(tmp_path / "b.json")
    same = RUNNER.invoke(app, ["plan", "diff", str(a), str(a)])
    assert same.exit_code == 0 and "the same decisions" in same.output
    got = RUNNER.invoke(app, ["plan", "diff", str(a), str(b)])
    assert got.exit_code == 1
    assert "mods: False -> True" in got.output and "+ b:" in got.output
    assert "a fwd: torch:rowwise -> high_precision (torch:rowwise: speedup 0.50" in got.output
    assert "- b" in "\n".join(diff(Plan.load(b), Plan.load(a)))
    shown = RUNNER.invoke(app, ["plan", "show", str(a)])
    assert shown.exit_code == 0 and "1.56x" in shown.output
    bad = RUNNER.invoke(app, ["plan", "show", str(tmp_path / "none.json")])
    assert bad.exit_code == 2 and "no such file" in bad.stderr
