"""Steps with probing and without it, in turns, under one compiled callable."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from loka_compile import loka_backend
from loka_compile.binding import Binding
from loka_compile.probing import Late
from loka_compile.runtime import Runtime

#: Steps of one callable before the other has its turn.
BLOCK = 100


#: Steps behind a probed one that count as its own, and plain ones around that it is held against.
AFTER, AROUND = 5, 15


class Run:
    """One compiled callable, whose probing can be paused."""

    def __init__(self, model: torch.nn.Module, inputs: Any, every: int, options: Any) -> None:
        self.model, self.inputs = model, inputs
        self.late: Late | None = None
        self.call: Callable[..., Any] = torch.compile(
            model, backend=self._compile, fullgraph=True, options={**options, "probe_every": every}
        )

    def _compile(self, gm: Any, inputs: list[Any], *, options: Any) -> Callable[..., Any]:
        runtime = loka_backend(gm, inputs, options=options)
        assert isinstance(runtime, Runtime)

        def call(*args: Any) -> Any:
            self.last = runtime, args
            return runtime(*args)

        return call

    def step(self) -> None:
        embeddings, dense = self.inputs
        for p in self.model.parameters():
            p.grad = None
        embeddings.grad = None
        self.call(embeddings, dense).float().mean().backward()

    @property
    def binding(self) -> Binding:
        runtime, args = self.last
        found = runtime.binding_of(args)
        assert found is not None
        return found

    def next_is_probed(self) -> bool:
        late = self.binding.late
        return late is not None and late.left <= 1

    def probe_in(self, steps: int) -> None:
        """The next probed step, whatever the schedule says: 1 is the next."""
        late = self.binding.late
        if late is not None:
            late.left = steps

    def pause(self, on: bool) -> None:
        """The schedule stands still meanwhile."""
        binding = self.binding
        if on and binding.late is not None:
            self.late, binding.late = binding.late, None
        elif not on and binding.late is None:
            binding.late = self.late


def timed(
    run: Run, steps: int, device: torch.device, every: int = 0
) -> tuple[float, list[float], list[bool]]:
    """Wall seconds of `steps` steps, milliseconds of each, and whether it was probed. every: probe
    one in so many, whatever the schedule says."""
    cuda = device.type == "cuda"
    probed, marks = [], []

    def mark() -> None:
        if cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append(event)
        else:
            marks.append(time.perf_counter())

    if cuda:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    mark()
    for number in range(steps):
        if every and number % every == 0:
            run.probe_in(every // 2 + 1)
        probed.append(run.next_is_probed())
        run.step()
        mark()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    each = [a.elapsed_time(b) if cuda else 1e3 * (b - a) for a, b in pairwise(marks)]
    return seconds, each, probed


def pair(run: Run, steps: int, device: torch.device, first: bool) -> dict[str, Any]:
    """So many steps with probing and without, in turns."""
    found: dict[str, Any] = {"on_s": 0.0, "off_s": 0.0, "on_ms": [], "off_ms": [], "probed": []}
    done, on = 0, first
    while done < steps:
        count = min(BLOCK, steps - done)
        for _ in range(2):
            name = "on" if on else "off"
            run.pause(not on)
            seconds, each, probed = timed(run, count, device)
            run.pause(False)
            found[name + "_s"] += seconds
            found[name + "_ms"].append(each)
            if on:
                found["probed"].append(probed)
            on = not on
        # The other one begins.
        on = not on
        done += count
    return found


def extra_ms(each: list[float], probed: list[bool]) -> list[float]:
    """Of every probed step of a block, with the steps behind it: what it took more."""
    found = []
    for at in (i for i, p in enumerate(probed) if p):
        end = min(at + 1 + AFTER, len(each))
        around = [
            ms
            for i, ms in enumerate(each)
            if not at <= i < end and at - AROUND <= i < end + AROUND and not probed[i]
        ]
        found.append(sum(each[at:end]) - (end - at) * statistics.median(around))
    return found
