"""The same probe file and cost table give the same plan, in training and without it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import loka_compile
from loka_compile import planner
from loka_compile import step_meter
from loka_compile.binder import Binder
from loka_compile.lowering.balance import StepTimes
from loka_compile.lowering.cost_store import default_table
from loka_compile.lowering.cost_table import CostRow
from loka_compile.lowering.fill import kernels_alone
from loka_compile.lowering.fill import moving_parts
from loka_compile.lowering.host_costs import HostCosts
from loka_compile.lowering.libraries import LIBRARIES
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.model_sites import places_of
from loka_compile.options import Options
from loka_compile.probe import saver
from loka_compile.step_meter import StepMeter

OPTIONS = {
    "inner": "aot_eager",
    "mods": "on",
    "tune": "never",
    "libraries": ("loka", "torch"),
    "recipes": ("tensorwise", "rowwise"),
    "probe_every": 0,
}


class Net(nn.Module):
    """Two fused layers that hand over, a bare one, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = nn.Sequential(
            nn.Linear(64, 96), nn.LayerNorm(96), nn.SiLU(), nn.Linear(96, 64), nn.LayerNorm(64),
            nn.SiLU(), nn.Linear(64, 128),
        )  # fmt: skip
        self.head = nn.Linear(128, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.mlp(x)))


@pytest.fixture
def priced(tmp_path, monkeypatch):
    """As if this CPU ran the kernels, with a made-up price for every part."""
    monkeypatch.setenv("LOKA_CACHE", str(tmp_path / "cache"))
    for name in OPTIONS["libraries"]:
        monkeypatch.setattr(LIBRARIES[name], "why_unavailable", lambda device: None, raising=False)
        none = lambda recipe, device: None  # noqa: E731
        monkeypatch.setattr(LIBRARIES[name], "why_no_recipe", none, raising=False)
    # Row-scaled products of a CPU take their time; their errors are those of the emulation.
    real = planner.quantify
    emulated = lambda direction, kernel, *rest: real(direction, kernel + EMULATED, *rest)  # noqa: E731
    monkeypatch.setattr(planner, "quantify", emulated)
    torch._dynamo.reset()
    model = Net().bfloat16()
    x = torch.randn(64, 64).bfloat16()
    options = Options.parse(OPTIONS, None)
    random_ = random.Random(7)
    rows = {}
    for one in places_of(model, [x], torch.device("cpu"), options):
        for key in [*kernels_alone(one.place, options), *moving_parts(one.place, options)]:
            low, high = (10, 14) if key.direction in DIRECTIONS else (0.1, 2)
            rows[key] = random_.uniform(low, high) * (1.6 if "high" in key.recipe else 1.0)
    default_table().put(CostRow(key, us, "2026-01-01") for key, us in rows.items())
    return model, x


def test_online_and_offline_agree(priced, tmp_path):
    model, x = priced
    options = {**OPTIONS, "probe_dir": str(tmp_path / "probe"), "probe_rows_on_disk": True}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="loka", options=options)
    for _ in range(9):
        compiled(x).float().square().mean().backward()
    loka_compile.probe_save()
    online = loka_compile.plan_of(model)
    offline = loka_compile.plan_from_state(model, [x], tmp_path / "probe", options=options)
    assert online.active and offline.sites == online.sites
    assert (offline.mods, offline.block, offline.heads) == (online.mods, None, None)
    assert offline.blocks == online.blocks and len(offline.blocks or ()) == 2
    # A plan worth comparing: priced by parts, FP8 and high precision, our own kernel among it.
    choices = [site.choice(d) for site in online.sites.values() for d in DIRECTIONS]
    kernels = {c.kernel for c in choices}
    assert any(k.startswith("loka:") for k in kernels) and len(kernels) > 2
    assert all(c.us and c.source in ("table", "") for c in choices), choices


def test_a_step_that_waits_for_its_host_does_so_offline(priced, tmp_path, monkeypatch):
    """What the step takes is part of the state."""
    costs = HostCosts(launch=0.1, call=0.1, scaled=0.8, own=1.2)
    monkeypatch.setattr(planner, "host_costs", lambda device, replayed: costs)
    monkeypatch.setattr(Options, "weighs_host", property(lambda self: True))
    monkeypatch.setattr(Binder, "_host_counts", lambda self: True)
    monkeypatch.setattr(StepMeter, "times", lambda self: StepTimes(device=100.0, host=9000.0))
    monkeypatch.setattr(step_meter, "DEVICE_STEP", -1)
    model, x = priced
    options = {**OPTIONS, "probe_dir": str(tmp_path / "probe"), "probe_rows_on_disk": True}
    compiled = torch.compile(model, backend="loka", options=options)
    for _ in range(9):
        compiled(x).float().square().mean().backward()
    loka_compile.probe_save()
    online = loka_compile.plan_of(model)
    offline = loka_compile.plan_from_state(model, [x], tmp_path / "probe", options=options)
    assert offline.sites == online.sites
    kernels = {site.choice(d).kernel for site in online.sites.values() for d in DIRECTIONS}
    assert kernels == {HIGH_PRECISION}
    # Of other batches it says nothing.
    state = saver.load_folder(tmp_path / "probe")
    (first,) = state.steps
    state.steps[first] = replace(state.steps[first], rows=1)
    other = loka_compile.plan_from_state(model, [x], state, options=options)
    assert any(c.is_fp8 for site in other.sites.values() for c in site.directions.values())


def test_without_state_sites_stay_high_and_say_so(priced, tmp_path):
    from loka_compile.probe import store

    model, x = priced
    nothing = store.Loaded({}, {}, 0)
    plan = loka_compile.plan_from_state(model, [x], nothing, options=OPTIONS)
    reasons = {c.reason for site in plan.sites.values() for c in site.directions.values()}
    assert reasons == {"no input of this site was seen while probing"}
