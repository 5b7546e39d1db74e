"""What reports say of sites that nothing was decided for."""

from __future__ import annotations

import torch
from torch import nn

import loka_compile
from loka_compile import planner
from loka_compile.names import Site
from loka_compile.options import Options
from loka_compile.probe.quantify import Errors
from loka_compile.probe.statistics import AMAX
from loka_compile.probe.statistics import Statistics

GOOD = Errors(0.1, 0.05, 0.06, 0.0, 0.0, 28.0, 0.04, non_finite=0, samples=8)


def seen_once(monkeypatch) -> Statistics:
    """Of a tensor that was not zero."""
    seen = Statistics.empty(32, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(Statistics, "batches", 1)
    seen.scalars[AMAX] = 1.0
    return seen


def test_a_fused_linear_is_not_told_that_it_is_not_fused():
    """On a CPU without emulation our own kernel is no candidate; the chain is not to blame."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 48))
    options = {"inner": "eager", "mods": "on"}
    with loka_compile.explain() as report:
        torch.compile(model, backend="loka", options=options)(torch.randn(8, 64)).sum().backward()
    fused, last = report.sites
    assert fused["fused"] and not last["fused"]
    reasons = {c["reason"] for c in fused["directions"].values()}
    assert all("no FP8 hardware on cpu" in reason for reason in reasons)
    assert not any("not part of a fused chain" in reason for reason in reasons)


def test_what_one_kernel_does_with_its_neighbours_stays_in_high_precision(monkeypatch):
    """Unless the user forces it, or decides by accuracy alone, in software."""
    seen = seen_once(monkeypatch)
    offered = []
    monkeypatch.setattr(planner, "quantify", lambda *args: offered.append(args[0]) or GOOD)
    site = Site("a", "w", 0, 64, 32, 16, torch.float32, False)
    one = planner.Probed(
        site, torch.randn(16, 32), {(0, "x"): seen, (0, "g"): seen}, stays="part of one kernel"
    )
    plans, _ = planner.decide([one], Options())
    assert {c.reason for c in plans["a"].directions.values()} == {"part of one kernel"}
    plans, _ = planner.decide([one], Options.parse({"force": {"a": "torch:rowwise"}}, None))
    assert plans["a"].kernels == ("torch:rowwise",) * 3 and not offered
    plans, _ = planner.decide([one], Options(emulate=True))
    assert plans["a"].choice("fwd").is_fp8 and set(offered) == {"fwd", "dgrad", "wgrad"}


def test_a_site_without_prices_stays_in_high_precision(monkeypatch):
    seen = seen_once(monkeypatch)

    def broken(device, mode):
        raise RuntimeError("planted")

    monkeypatch.setattr(planner, "host_costs", broken)
    site = Site("a", "w", 0, 64, 32, 16, torch.float32, False)
    one = planner.Probed(site, torch.randn(16, 32), {(0, "x"): seen, (0, "g"): seen})
    told = []
    plans, _ = planner.decide([one], Options(), lambda *said: told.append(said))
    why = "could not be priced: RuntimeError: planted"
    assert {c.reason for c in plans["a"].directions.values()} == {why} and told == [("a", why)]


def test_the_report_says_what_a_plan_took():
    spent = planner.Spent()
    spent.seconds.update({planner.WHOLE: 12.34, "first uses": 4.06, "reasons": 0.01, "choice": 0.2})
    spent.counts.update({"first uses": 38, "rounds": 3})
    said = "plan made in 12.3 s: first uses 4.1 (38), choice 0.2 (3 rounds)"
    assert planner.sentence(spent) == said


def test_graphs_of_one_model_have_one_budget_for_timing(monkeypatch):
    budgets, real = [], planner.decide

    def decide(*arguments):
        budgets.append(arguments[5])
        return real(*arguments)

    monkeypatch.setattr(planner, "decide", decide)

    class Broken(nn.Sequential):
        def forward(self, x):
            x = self[0](x)
            torch._dynamo.graph_break()
            return self[1](x)

    options = {"inner": "eager", "mods": "off", "emulate": True, "probe_every": 0}
    for _ in range(2):
        torch._dynamo.reset()
        model = Broken(nn.Linear(32, 32), nn.Linear(32, 32))
        compiled = torch.compile(model, backend="loka", options=options)
        for _ in range(9):
            compiled(torch.randn(16, 32, requires_grad=True)).square().sum().backward()
    first, second, third, fourth = budgets
    assert first is second and third is fourth and first is not third
