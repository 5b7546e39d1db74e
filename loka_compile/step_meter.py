"""What one training step of a graph takes the host and the device, less what its observers take.

A choice of kernels knows what linears take. Where all the rest of a step keeps the host busy for
longer than the device, a kernel that spares the device and costs the host makes it slower, however
much longer the device needs for the linears alone. So a few of the early steps, which run in high
precision, are timed, forward and backward apart:
    the host    by the clock, around the call and around the graph's node in the backward, with
                nothing left to do for the device; the least of three steps
    the device  in the next step, by events. Each part waits on the device behind a delay, longer
                than the host needs to start it: then nothing that fits in the driver's queue waits
                for the host
Only in default mode on CUDA: where CUDA graphs are replayed the host does not count. Steps of other
shapes than the first one, and those that a user records as a CUDA graph, are not timed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.lowering.balance import StepTimes
from loka_compile.probe import observers

log = logging.getLogger("loka_compile")

#: Of the early steps: after those in which kernels are compiled and loaded.
HOST_STEPS, DEVICE_STEP = (3, 4, 5), 6
FORWARD, BACKWARD = "forward", "backward"
#: The delay in units of what the host took, and its bounds in microseconds.
_MARGIN, _LEAST_US, _MOST_US = 2.0, 2e3, 2e5


@dataclass
class _Part:
    """A forward or a backward of one step that is timed; `observed`: its observers' part of it."""

    name: str
    begun: float = 0.0
    observed: float = 0.0
    whole: _Pair | None = None
    pairs: list[_Pair] = field(default_factory=list)
    open: bool = True


class StepMeter:
    """Of the steps of one binding; `times` once both sides were timed, None before and without a
    backward."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        #: Part -> microseconds of the host, less its observers'.
        self._host: dict[str, float] = {}
        self._on_device: dict[str, _Part] = {}
        self._shapes: list[torch.Size] | None = None
        self._running: list[_Part] = []
        #: The step whose forward was timed last.
        self._step: int | None = None
        self._times: StepTimes | None = None

    @contextmanager
    def forward(self, step: int, args: Sequence[Any]) -> Iterator[None]:
        """Around the graph's call; step: how many there were before. args: its inputs."""
        for left in self._running:
            # Its backward never ended: what it left behind stops itself.
            left.open = False
        self._running.clear()
        part = self._begin(FORWARD, step) if self._may_time(step, args) else None
        self._step = None if part is None else step
        try:
            yield
        except BaseException:
            if part is not None:
                self._drop(part)
            raise
        if part is not None:
            self._end(part, step)

    def backward(self, out: Any, step: int) -> None:
        """Time the backward of the graph that returned `out`, if its forward was timed."""
        if self._step == step and not _compat.compiles_backwards():
            node = _node_of(out)
            if node is not None:
                self._around(node, step)

    def times(self) -> StepTimes | None:
        """Waits for the device to be done with the step that was timed."""
        if self._times is None and {FORWARD, BACKWARD} <= self._on_device.keys():
            device = 0.0
            for part in self._on_device.values():
                assert part.whole is not None
                device += part.whole.us() - sum(pair.us() for pair in part.pairs)
            host = sum(self._host.values())
            self._times = StepTimes(max(device, 0.0), max(host, 0.0))
            self._on_device.clear()
        return self._times

    def _may_time(self, step: int, args: Sequence[Any]) -> bool:
        if step not in (*HOST_STEPS, DEVICE_STEP) or self._captures():
            return False
        shapes = [a.shape for a in args if isinstance(a, Tensor)]
        if self._shapes is None:
            self._shapes = shapes
        return self._shapes == shapes

    def _captures(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _around(self, node: Any, step: int) -> None:
        found: list[_Part] = []

        def begins(_: Any) -> None:
            # Compiled autograd would trace the clock.
            if not (torch.compiler.is_dynamo_compiling() or found or self._captures()):
                part = self._begin(BACKWARD, step)
                if part is not None:
                    found.append(part)

        def ends(*_: Any) -> None:
            if not torch.compiler.is_dynamo_compiling() and found and found[0].open:
                self._end(found[0], step)

        node.register_prehook(begins)
        node.register_hook(ends)

    def _begin(self, name: str, step: int) -> _Part | None:
        part = _Part(name)
        if step == DEVICE_STEP:
            if not {FORWARD, BACKWARD} <= self._host.keys():
                return None
            delay = min(max(_MARGIN * self._host[name], _LEAST_US), _MOST_US)
            log.info("loka: the device waits %.0f ms or more, to time a %s", delay / 1e3, name)
            _compat.delay_device(self.device, delay)
            part.whole = _Pair(self.device)
        else:
            _compat.await_stream(self.device)
            part.begun = time.perf_counter()
        self._running.append(part)
        observers.set_around(lambda run: self._observe(part, run))
        return part

    def _observe(self, part: _Part, run: Callable[[], None]) -> None:
        if not part.open:
            observers.set_around(None)
            run()
        elif part.whole is not None:
            pair = _Pair(self.device)
            run()
            pair.close()
            part.pairs.append(pair)
        else:
            begun = time.perf_counter()
            run()
            part.observed += time.perf_counter() - begun

    def _drop(self, part: _Part) -> None:
        part.open = False
        observers.set_around(None)

    def _end(self, part: _Part, step: int) -> None:
        self._drop(part)
        if part.whole is not None:
            part.whole.close()
            self._on_device[part.name] = part
            return
        us = 1e6 * (time.perf_counter() - part.begun - part.observed)
        self._host[part.name] = min(us, self._host.get(part.name, us))


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


def _node_of(out: Any) -> Any:
    """The graph's own node behind one of its results, which may be views of what it returned."""
    for tensor in out if isinstance(out, (list, tuple)) else (out,):
        node = tensor.grad_fn if isinstance(tensor, Tensor) else None
        for _ in range(3):
            if node is None or _compat.is_compiled_backward(node):
                break
            node = node.next_functions[0][0] if node.next_functions else None
        if node is not None and _compat.is_compiled_backward(node):
            return node
    return None
