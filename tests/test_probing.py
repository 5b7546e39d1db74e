"""Probing after the plan: which steps, which variant, what plain steps pay, restarts and kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import loka_compile
from loka_compile import loka_backend
from loka_compile.ledger import LEDGER
from loka_compile.probe import saver
from loka_compile.probe.schedule import Schedule
from loka_compile.probe.session import session
from loka_compile.probe.turns import SITES

OPTIONS = {"inner": "eager", "emulate": True, "mods": "off", "heads": ()}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def steps(compiled, count: int, scale: float = 1.0) -> None:
    for _ in range(count):
        compiled(scale * torch.randn(24, 32)).square().sum().backward()


def compiled_of(one: nn.Module, **options):
    torch._dynamo.reset()
    return torch.compile(one, backend=loka_backend, options={**OPTIONS, **options})


def batches(weight: torch.Tensor) -> tuple[int, int]:
    entry = LEDGER.find(weight)
    return tuple(entry.statistics[(0, role)].batches for role in ("x", "g"))


def test_probes_where_the_schedule_says() -> None:
    one = model()
    run = compiled_of(one, probe_every=10)
    steps(run, 8)
    assert batches(one[0].weight) == (8, 8)
    schedule = Schedule(10)
    done = 8
    for window in range(3):
        at = schedule.probed_in(window)
        steps(run, at - 1 - done)
        assert batches(one[0].weight) == (8 + window, 8 + window)
        steps(run, 1)
        assert batches(one[0].weight) == (9 + window, 9 + window)
        done = at


def test_late_probes_leave_out_what_only_time_keeps_high() -> None:
    one = model()
    steps(compiled_of(one, probe_every=1), 12)
    plan = loka_compile.plan_of(one)
    slow = {d: c.kept_high("speedup 0.7 < 1.05") for d, c in plan.sites["2"].directions.items()}
    slow = {d: replace(c, speedup=0.7) for d, c in slow.items()}
    inaccurate = {d: replace(c, speedup=1.4) for d, c in slow.items()}
    # A kernel that lost by its price has never run: there is no error of it.
    never_run = {d: replace(c, speedup=None, mere_clamped=None) for d, c in slow.items()}
    for directions, watched in ((slow, False), (inaccurate, True), (never_run, False)):
        again = model()
        sites = {**plan.sites, "2": replace(plan.sites["2"], directions=directions)}
        run = compiled_of(again, probe_every=1, plan=replace(plan, sites=sites))
        steps(run, 12)
        assert batches(again[0].weight)[0] >= 3
        held = LEDGER.find(again[2].weight).statistics
        assert ((0, "x") in held) == watched


def test_late_probes_keep_the_plan_and_the_values() -> None:
    one = model()
    run = compiled_of(one, probe_every=1)
    steps(run, 12)
    plan = loka_compile.plan_of(one)
    assert plan.active and any(c.is_fp8 for s in plan.sites.values() for c in s.directions.values())
    x = torch.randn(24, 32, requires_grad=True)
    results = []
    for every in (1, 0):
        again = compiled_of(one, probe_every=every, plan=plan)
        for _ in range(20):
            one.zero_grad()
            x.grad = None
            y = again(x)
            y.square().sum().backward()
        results.append((y.detach(), x.grad.clone(), one[0].weight.grad.clone()))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert loka_compile.plan_of(one).sites == plan.sites


def test_none_after_the_early_steps_when_asked() -> None:
    one = model()
    run = compiled_of(one, probe_every=0)
    steps(run, 40)
    assert batches(one[0].weight) == (8, 8)


def test_a_checkpoint_around_the_graph_gets_one_variant_per_step() -> None:
    """The recomputation must save what the forward saved, or torch raises."""
    one = model()
    run = compiled_of(one, probe_every=3, inner="aot_eager")
    for _ in range(40):
        x = torch.randn(24, 32, requires_grad=True)
        checkpoint(run, x, use_reentrant=False).square().sum().backward()
    x, g = batches(one[0].weight)
    # The recomputed forward has the same input again: rows of x and g are of one batch.
    assert x == g >= 8 + 6


def test_two_forwards_before_a_backward() -> None:
    one = model()
    run = compiled_of(one, probe_every=2)
    for _ in range(20):
        a, b = run(torch.randn(24, 32)), run(torch.randn(24, 32))
        (a.square().sum() + b.square().sum()).backward()
    x, g = batches(one[0].weight)
    assert x == g > 15


def test_turns_wait_for_all_backwards_of_a_step() -> None:
    one = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2 * SITES)))
    run = compiled_of(one, probe_every=1, inner="aot_eager", min_speedup=0, max_mere=1e9)
    for _ in range(20):
        a, b = run(torch.randn(24, 16)), run(torch.randn(24, 16))
        a.square().sum().backward()
        b.square().sum().backward()
    seen = [batches(layer.weight) for layer in one]
    assert all(x == g > 8 for x, g in seen), seen


def test_gradients_are_recorded_though_a_decision_moved_behind_their_forward() -> None:
    one = model()
    run = compiled_of(one, probe_every=0)
    first = run(torch.randn(24, 32))
    # Of another model: all look up anew what they are bound to.
    LEDGER.touch()
    second = run(torch.randn(24, 32))
    (first.square().sum() + second.square().sum()).backward()
    assert batches(one[0].weight) == (2, 2)


def test_metrics_and_drift() -> None:
    one = model()
    run = compiled_of(one, probe_every=1)
    # In order of steps, whichever model they are of.
    before = loka_compile.probe_events()
    steps(run, 50)
    numbers = loka_compile.probe_metrics()
    assert numbers["loka/0/input/batches"] >= 48
    what = {name.split("/")[2] for name in numbers if name.startswith("loka/0/")}
    assert what == {"input", "gradient", "weight"}
    assert all(isinstance(value, float) for value in numbers.values())
    assert numbers["loka/0/weight/amax"] == float(one[0].weight.detach().abs().max())
    assert 0.4 < numbers["loka/2/input/zero_share"] < 0.6
    assert not [e for e in loka_compile.probe_events() if e not in before and "input" in e.quantity]
    steps(run, 12, scale=4.0)
    events = [e for e in loka_compile.probe_events() if e not in before and e.site == "0"]
    hit = next(e for e in events if e.quantity == "input RMS")
    assert 50 < hit.step <= 62 and 3 < hit.factor < 5


def test_masked_rows_are_left_out() -> None:
    one = model()
    run = compiled_of(one, probe_every=0)
    x = torch.randn(24, 32)
    x[20:] = 1e6
    mask = torch.arange(24) < 20
    for _ in range(3):
        with loka_compile.probe_rows(mask):
            run(x).square().sum().backward()
    held = LEDGER.find(one[0].weight).statistics[(0, "x")]
    assert held.summary()["excluded_rows"] == 12 and held.summary()["amax"] < 100
    assert held.reservoir().abs().max() < 100 and held.reservoir().shape[0] > 20
    assert LEDGER.find(one[0].weight).statistics[(0, "g")].summary()["excluded_rows"] == 12


def test_state_is_saved_and_taken_up_again(tmp_path: Path) -> None:
    one = model()
    run = compiled_of(one, probe_dir=tmp_path, probe_every=5)
    steps(run, 30)
    loka_compile.probe_save()
    loaded = saver.load_folder(tmp_path)
    seen = loaded.statistics[("0", "x")].batches
    assert seen >= 11 and loaded.step > 20 and "0" in loaded.weights
    # Another process: nothing of this one's session.
    from loka_compile.probe import session as module

    module._SESSIONS.pop(tmp_path.absolute())
    other = model()
    steps(compiled_of(other, probe_dir=tmp_path, probe_every=5), 3)
    assert batches(other[0].weight)[0] == seen + 3
    assert session(tmp_path).step >= loaded.step
    module._SESSIONS.pop(tmp_path.absolute())


def test_a_save_behind_a_forward_keeps_pairs(tmp_path: Path) -> None:
    """Every periodic save is one; the process ends before the next."""
    from loka_compile.probe import session as module
    from loka_compile.probe.quantify import _paired

    def train(one, count: int, first: int) -> None:
        run = compiled_of(one, probe_dir=tmp_path, probe_every=1, probe_rows_on_disk=True)
        for step in range(first, first + count):
            # Row i of the input, and of the gradient, is i.
            ids = torch.arange(16.0 * step, 16.0 * step + 16).unsqueeze(1)
            (run(ids.expand(-1, one[0].in_features).contiguous()) * ids).sum().backward()

    session(tmp_path, rows_on_disk=True).save_every = 10
    train(nn.Sequential(nn.Linear(16, 16)), 12, 0)
    session(tmp_path)._saver.wait()
    # What a killed process leaves.
    del module._SESSIONS[tmp_path.absolute()]
    one = nn.Sequential(nn.Linear(16, 16))
    train(one, 1, 100)
    x, g = (LEDGER.find(one[0].weight).statistics[(0, role)] for role in "xg")
    assert (x.batches, g.batches) == (11, 10)
    rows_x, rows_g = _paired(x, g, torch.float32)
    assert torch.equal(rows_x[:, 0], rows_g[:, 0])
    # Ten steps of 16 rows less the one whose gradient was never saved, and that of this run.
    assert len(rows_x) == 9 * 16 + 16
    train(one, 1, 101)
    rows_x, rows_g = _paired(x, g, torch.float32)
    assert torch.equal(rows_x[:, 0], rows_g[:, 0]) and len(rows_x) == 9 * 16 + 32
    del module._SESSIONS[tmp_path.absolute()]


TRAINING = r"""
import sys, torch, loka_compile
from loka_compile import loka_backend
from loka_compile.probe.session import session
folder = __import__("pathlib").Path(sys.argv[1])
session(folder).save_every = 10
model = torch.nn.Linear(512, 2048)
run = torch.compile(model, backend=loka_backend, options=dict(
    inner="eager", emulate=True, mods="off", heads=(), probe_every=1, probe_dir=folder))
step = 0
while step < int(sys.argv[2]):
    run(torch.randn(16, 512)).square().sum().backward()
    step += 1
    print(step, flush=True)
"""


def test_kill_9_while_training_loses_at_most_the_last_interval(tmp_path: Path) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(tmp_path), "1000000"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    step = 0
    while step < 45:
        step = int(worker.stdout.readline())
    os.kill(worker.pid, signal.SIGKILL)
    rest = worker.stdout.read().split()
    worker.wait()
    last = int(rest[-1]) if rest else step
    loaded = saver.load_folder(tmp_path)
    # A save of every tenth step; the one under way when the signal came may be lost.
    assert loaded.step >= last - 20 and loaded.step % 10 == 0
    assert all(held.batches >= loaded.step - 1 for held in loaded.statistics.values())


def test_the_state_is_saved_at_exit(tmp_path: Path) -> None:
    """Twelve steps with a save after ten: what came after it is there too."""
    arguments = [sys.executable, "-c", TRAINING, str(tmp_path), "12"]
    subprocess.run(arguments, check=True, capture_output=True)
    loaded = saver.load_folder(tmp_path)
    assert loaded.step == 12
    assert all(held.batches == 12 for held in loaded.statistics.values())
