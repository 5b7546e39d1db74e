"""The error estimate that drift watches: the measured error while nothing moves; what moves it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import loka_compile
from loka_compile import loka_backend
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.options import PROBE_STEPS
from loka_compile.probe.estimate import _in_plain_torch
from loka_compile.probe.estimate import by_kernels
from loka_compile.probe.estimate import clamped_error
from loka_compile.probe.estimate import kernel_of
from loka_compile.probe.estimate import scales_of
from loka_compile.probe.quantify import quantify
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.statistics import update

TENSORWISE = "torch:tensorwise+emulated"


def observed(*batches: torch.Tensor) -> Statistics:
    first = batches[0]
    held = Statistics.empty(first.shape[1], first.dtype, first.device)
    for x in batches:
        update(x, held)
    return held


@pytest.mark.parametrize("kernel", [TENSORWISE, "torch:rowwise+emulated"])
def test_it_is_the_measured_error(kernel: str, device) -> None:
    held = observed(*(torch.randn(100, 64, device=device) for _ in range(8)))
    w = torch.randn(48, 64, device=device)
    want = quantify("fwd", kernel, w, held, None, torch.float32).mere_clamped
    assert float(clamped_error(kernel, w, held)) == pytest.approx(want, rel=0.1)
    assert float(clamped_error(kernel, w.t(), held)) == pytest.approx(want, rel=0.1)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_few_launches_it_is_the_same(recipe: str, dtype, device, monkeypatch) -> None:
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton's kernels run on the GPU here")

    def by_hand(self, a, sa, b, sb, rule, out_dtype):
        return ((a.float() * sa) @ (b.float() * sb).t()).to(out_dtype)

    kernel = f"torch:{recipe}"
    monkeypatch.setattr(type(split_kernel_name(kernel)[0]), "gemm", by_hand)
    scales = scales_of(kernel)
    assert scales is not None and scales_of("bf16:plain") is None
    x = torch.randn(100, 72, device=device)
    x[5, 3] = float("inf")
    for shape in ((48, 72), (1030, 72)):
        w = torch.randn(shape, device=device).to(dtype)
        w[1, 0] = 300
        for held in (
            observed(x.to(dtype), 4 * torch.randn(60, 72, device=device).to(dtype)),
            Statistics.empty(72, dtype, torch.device(device)),
        ):
            want = float(_in_plain_torch(kernel, w, held))
            for one in (w, w.t().contiguous().t()):
                got = float(by_kernels(kernel, one, held, *scales))
                assert got == pytest.approx(want, rel=1e-4)


def test_channels_that_are_left_out_count_by_their_maximum() -> None:
    held = observed(*(torch.randn(100, 64) for _ in range(4)))
    w = torch.randn(1024, 64)
    before = float(clamped_error(TENSORWISE, w, held))
    assert before == pytest.approx(float(clamped_error(TENSORWISE, w[::4], held)), rel=0.05)
    # Not one of the channels looked at, but of the weight whose scale they share.
    w[1, 0] = 1e5
    assert float(clamped_error(TENSORWISE, w, held)) > 2 * before


def test_moderate_growth_does_not_move_it_and_a_lone_maximum_does() -> None:
    held = observed(*(torch.randn(100, 64) for _ in range(8)))
    w = torch.randn(48, 64)
    before = float(clamped_error(TENSORWISE, w, held))
    for scale in (8.0, 30.0, 1e-2, 1.0):
        update(scale * torch.randn(100, 64), held)
        assert float(clamped_error(TENSORWISE, w, held)) == pytest.approx(before, rel=0.1)
    # One value of 1e5: the rest falls below the smallest normal number.
    held = observed(*(torch.randn(100, 64) for _ in range(8)))
    spike = torch.randn(1000, 64)
    spike[0, 0] = 1e5
    update(spike, held)
    assert float(clamped_error(TENSORWISE, w, held)) > 2 * before


def test_degenerate_states() -> None:
    w = torch.randn(48, 64)
    nothing = Statistics.empty(64, torch.float32, torch.device("cpu"))
    assert float(clamped_error(TENSORWISE, w, nothing)) == 0
    assert float(clamped_error(TENSORWISE, w, observed(torch.zeros(8, 64)))) == 0
    x = torch.randn(40, 64)
    x[3] = float("nan")
    assert 0 < float(clamped_error(TENSORWISE, w, observed(x))) < 0.2
    assert kernel_of(None, w.device, emulated=True) is None


def test_an_event_names_site_step_and_size() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    options = {"inner": "eager", "emulate": True, "mods": "off", "heads": (), "probe_every": 1}
    run = torch.compile(
        model,
        backend=loka_backend,
        options={**options, "recipes": "tensorwise", "libraries": "torch"},
    )

    def steps(count: int) -> None:
        for _ in range(count):
            run(torch.randn(64, 32)).square().sum().backward()

    before = loka_compile.probe_events()

    def errors() -> list:
        new = [e for e in loka_compile.probe_events() if e not in before]
        return [e for e in new if e.quantity == "forward error"]

    steps(70)
    assert loka_compile.plan_of(model).sites["0"].choice("fwd").is_fp8
    assert not errors()
    # One huge output makes the weight's tensorwise scale useless to all others.
    with torch.no_grad():
        model[0].weight[0] *= 1e6
    steps(24)
    # What the other site reads has become huge, too.
    events = [e for e in errors() if e.site == "0"]
    assert events and 70 < events[0].step <= 94
    assert events[0].factor > 1.2 and "forward error" in str(events[0])
    # It alarms and switches nothing.
    assert loka_compile.plan_of(model).sites["0"].choice("fwd").is_fp8


def test_past_the_first_probes_weights_and_errors_take_turns(monkeypatch) -> None:
    from loka_compile.probe import session as module
    from loka_compile.probe import weights

    asked: list[str] = []
    estimate, observe = module.clamped_error, weights.Record.observe
    monkeypatch.setattr(
        module, "clamped_error", lambda *a: (asked.append("error"), estimate(*a))[1]
    )
    monkeypatch.setattr(
        weights.Record, "observe", lambda *a: (asked.append("weights"), observe(*a))[1]
    )
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    options = {"inner": "eager", "emulate": True, "mods": "off", "probe_every": 1, "heads": ()}
    chosen = {**options, "recipes": "tensorwise", "libraries": "torch"}
    run = torch.compile(model, backend=loka_backend, options=chosen)
    for step in range(PROBE_STEPS + 9):
        run(torch.randn(64, 32)).square().sum().backward()
        if step + 1 == PROBE_STEPS:
            # No plan, and so no kernel whose error is to be known.
            assert asked == ["weights"] * PROBE_STEPS
    late = asked[PROBE_STEPS:]
    assert len(late) >= 8 and late[::2] != late[1::2]
    assert set(late[::2]) | set(late[1::2]) == {"weights", "error"}
    assert len(set(late[::2])) == len(set(late[1::2])) == 1


def test_a_kernel_that_fails_silences_the_estimate_not_the_training(monkeypatch) -> None:
    from loka_compile.probe import session as module

    def broken(*_):
        raise RuntimeError("bad launch")

    monkeypatch.setattr(module, "clamped_error", broken)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    options = {"inner": "eager", "emulate": True, "mods": "off", "probe_every": 1}
    chosen = {**options, "recipes": "tensorwise", "libraries": "torch"}
    run = torch.compile(model, backend=loka_backend, options=chosen)
    for _ in range(16):
        run(torch.randn(64, 32)).square().sum().backward()
    assert loka_compile.plan_of(model).sites["0"].choice("fwd").is_fp8
    one = module.session(None)
    assert "0" in one._silent
    one._silent.clear()
