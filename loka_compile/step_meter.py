"""What one training step of a graph takes the host and the device, less what its observers take.

A choice of kernels knows what linears take. Where all the rest of a step keeps the host busy for
longer than the device, a kernel that spares the device and costs the host makes it slower, however
much longer the device needs for the linears alone. So two of the early steps, which run in high
precision, are timed, forward and backward apart:
    the host    by the clock, around the call and around the graph's node in the backward
    the device  in the next step, by events. Each part waits on the device behind a delay, longer
                than the host needs to start it: then nothing in it waits for the host
Only in default mode on CUDA: where CUDA graphs are replayed the host does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.lowering.balance import StepTimes
from loka_compile.probe import observers

#: Of the early steps: after those in which kernels are compiled and loaded.
HOST_STEP, DEVICE_STEP = 5, 6
#: The delay in units of what the host took the step before, and its bounds in microseconds.
_MARGIN, _LEAST_US, _MOST_US = 2.0, 2e3, 2e5


class StepMeter:
    """Of the steps of one binding; `times` once both were timed, None before and without a
    backward."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        #: Part -> microseconds of the host: "forward", "backward", and those of observers in each.
        self._host: dict[str, float] = {}
        #: Part -> pairs of events, and those of observers in it.
        self._events: dict[str, list[_Pair]] = {}
        self._times: StepTimes | None = None

    @contextmanager
    def forward(self, step: int) -> Iterator[None]:
        """Around the graph's call; step: how many there were before."""
        with self._timed("forward", step):
            yield

    def backward(self, out: Any, step: int) -> None:
        """Time the backward of the graph that returned `out`."""
        if step not in (HOST_STEP, DEVICE_STEP):
            return
        for tensor in out if isinstance(out, (list, tuple)) else (out,):
            node = tensor.grad_fn if isinstance(tensor, Tensor) else None
            if node is not None and _compat.is_compiled_backward(node):
                self._around(node, step)
                return

    def _around(self, node: Any, step: int) -> None:
        timed = self._timed("backward", step)

        def begins(_: Any) -> None:
            # Compiled autograd would trace the clock.
            if not torch.compiler.is_dynamo_compiling() and not running:
                running.append(timed)
                timed.__enter__()

        def ends(*_: Any) -> None:
            if not torch.compiler.is_dynamo_compiling() and len(running) == 1:
                running.append(None)
                timed.__exit__(None, None, None)

        running: list[Any] = []
        node.register_prehook(begins)
        node.register_hook(ends)

    @contextmanager
    def _timed(self, part: str, step: int) -> Iterator[None]:
        if step == HOST_STEP:
            with _on_host(self._host, part):
                yield
        elif step == DEVICE_STEP and part in self._host:
            delay = min(max(_MARGIN * self._host[part], _LEAST_US), _MOST_US)
            _compat.delay_device(self.device, delay)
            with _on_device(self._events, part, self.device):
                yield
        else:
            yield

    def times(self) -> StepTimes | None:
        """Waits for the device to be done with the steps that were timed."""
        parts = ("forward", "backward")
        if self._times is not None:
            return self._times
        if any(part not in self._host or part not in self._events for part in parts):
            return None
        host, device = 0.0, 0.0
        for part in parts:
            host += self._host[part] - self._host.get(_observing(part), 0.0)
            device += sum(one.us() for one in self._events[part])
            device -= sum(one.us() for one in self._events.get(_observing(part), ()))
        self._times = StepTimes(max(device, 0.0), max(host, 0.0))
        return self._times


class _Pair:
    """Two events around what is started between them on the stream of now."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._mark(self.begin)

    def close(self) -> None:
        self._mark(self.end)

    def _mark(self, event: torch.cuda.Event) -> None:
        event.record(torch.cuda.current_stream(self.device))

    def us(self) -> float:
        self.end.synchronize()
        return 1e3 * float(self.begin.elapsed_time(self.end))


def _observing(part: str) -> str:
    return f"observers in {part}"


@contextmanager
def _on_host(held: dict[str, float], part: str) -> Iterator[None]:
    inside = 0.0

    def observe(run: Callable[[], None]) -> None:
        nonlocal inside
        begun = time.perf_counter()
        run()
        inside += time.perf_counter() - begun

    begun = time.perf_counter()
    with observers.around(observe):
        yield
    held[part] = 1e6 * (time.perf_counter() - begun)
    held[_observing(part)] = 1e6 * inside


@contextmanager
def _on_device(held: dict[str, list[_Pair]], part: str, device: torch.device) -> Iterator[None]:
    inside: list[_Pair] = []

    def observe(run: Callable[[], None]) -> None:
        inside.append(_Pair(device))
        run()
        inside[-1].close()

    whole = _Pair(device)
    with observers.around(observe):
        yield
    whole.close()
    held[part], held[_observing(part)] = [whole], inside
