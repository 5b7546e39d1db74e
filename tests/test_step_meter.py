"""What a step takes: forward and backward of a graph, host and device, without observers."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from loka_compile import _compat
from loka_compile import step_meter
from loka_compile.probe import observers
from loka_compile.step_meter import DEVICE_STEP
from loka_compile.step_meter import HOST_STEPS
from loka_compile.step_meter import StepMeter

CPU = torch.device("cpu")
#: Seconds that what is timed sleeps, and its observers in it.
LONG, OBSERVED = 0.03, 0.02


class Clock:
    """In place of CUDA events: a device that is done at once."""

    def __init__(self, device):
        self.begun = time.perf_counter()

    def close(self):
        self.ended = time.perf_counter()

    def us(self):
        return 1e6 * (self.ended - self.begun)


@pytest.fixture
def delays(monkeypatch):
    found = []
    monkeypatch.setattr(step_meter, "_Pair", Clock)
    monkeypatch.setattr(_compat, "delay_device", lambda device, us: found.append(us))
    return found


class Slow(torch.autograd.Function):
    """Sleeps on both ways, part of it where an observer would."""

    @staticmethod
    def forward(ctx, x):
        _work()
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        _work()
        return gradient * 2


def _work():
    time.sleep(LONG - OBSERVED)
    observers._timed(lambda: time.sleep(OBSERVED))()


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    monkeypatch.setattr(_compat, "is_compiled_backward", lambda node: "Slow" in node.name())


def run(meter, step, rows=3, view=lambda out: out, pause=0.0):
    x = torch.ones(rows, requires_grad=True)
    with meter.forward(step, (x, None)):
        out = Slow.apply(x)
        time.sleep(pause)
    meter.backward((None, view(out)), step)
    # What runs behind the graph is none of its.
    behind = view(out) * 3
    behind.register_hook(lambda _: time.sleep(LONG))
    behind.sum().backward()
    assert torch.equal(x.grad, torch.full((rows,), 6.0))


@pytest.mark.parametrize("view", [lambda out: out, lambda out: out.view(-1, 1).view(-1)])
def test_forward_and_backward_without_observers(delays, view):
    meter = StepMeter(CPU)
    for step in range(DEVICE_STEP + 1):
        assert meter.times() is None
        # A pause of one step is none of what a step takes.
        run(meter, step, view=view, pause=0.1 if step == HOST_STEPS[1] else 0.0)
    times = meter.times()
    least, most = 2e6 * (LONG - OBSERVED), 2e6 * LONG
    assert least <= times.host < most and least <= times.device < most
    # Each part waited for longer than the host needs to start it.
    assert len(delays) == 2 and all(us > 1e6 * (LONG - OBSERVED) for us in delays)


def test_no_delay_without_a_time_of_the_host(delays):
    meter = StepMeter(CPU)
    run(meter, DEVICE_STEP)
    assert meter.times() is None and not delays


def test_no_step_of_other_shapes(delays):
    meter = StepMeter(CPU)
    for step in HOST_STEPS:
        run(meter, step)
    run(meter, DEVICE_STEP, rows=5)
    assert meter.times() is None and not delays


def test_no_step_that_a_graph_records(delays, monkeypatch):
    meter = StepMeter(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for step in (*HOST_STEPS, DEVICE_STEP):
        run(meter, step)
    assert meter.times() is None and not delays


def test_a_step_without_a_backward_is_no_step(delays):
    meter = StepMeter(CPU)
    for step in (*HOST_STEPS, DEVICE_STEP):
        with meter.forward(step, ()):
            _work()
        meter.backward(torch.ones(2), step)
    assert meter.times() is None and not delays


class Fails(torch.autograd.Function):
    """In its backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("out of luck")


def test_a_step_that_fails_leaves_nothing_behind(delays, monkeypatch):
    monkeypatch.setattr(_compat, "is_compiled_backward", lambda node: "Fails" in node.name())
    meter = StepMeter(CPU)
    for step in (*HOST_STEPS, DEVICE_STEP):
        x = torch.ones(3, requires_grad=True)
        with pytest.raises(RuntimeError, match="forward"), meter.forward(step, (x,)):
            _work()
            raise RuntimeError("forward")
        assert observers._runs.around is None
        with meter.forward(step, (x,)):
            out = Fails.apply(x)
        meter.backward(out, step)
        with pytest.raises(ValueError, match="luck"):
            out.sum().backward()
    with meter.forward(DEVICE_STEP + 1, (x,)):
        _work()
    assert observers._runs.around is None and meter.times() is None


@pytest.mark.gpu
def test_of_a_compiled_step_on_a_gpu(monkeypatch) -> None:
    """The device's time is that of a long product; the host's, of few launches."""
    monkeypatch.undo()
    torch._dynamo.reset()
    model = nn.Linear(4096, 4096, bias=False, device="cuda")
    compiled = torch.compile(model)
    x = torch.randn(8192, 4096, device="cuda", requires_grad=True)
    meter = StepMeter(x.device)
    for step in range(DEVICE_STEP + 1):
        with meter.forward(step, (x,)):
            out = compiled(x)
        meter.backward(out, step)
        out.sum().backward()
    times = meter.times()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    with torch.no_grad():
        for _ in range(3):
            torch.mm(x, model.weight)
    end.record()
    torch.cuda.synchronize()
    products = 1e3 * begin.elapsed_time(end)
    assert 0.8 * products < times.device < 1.3 * products
    assert 10.0 < times.host < 0.5 * times.device
