r"""What probing costs: paired runs of a training step with and without it, and a profile of both.

    python benchmarks/bench_probe_overhead.py --out benchmarks/results/probe_overhead_h200.json

Wukong's dense part, forward and backward to parameters and input, bf16, one plan (made by the first
8 steps). A pair is `--steps` steps with probing (`probe_every=100`) and as many with it paused, in
turning blocks of `BLOCK`, under one compiled callable: a second compile of the same graph differs
by more on a host-bound step than what is looked for. A probed step is compared with the plain ones
around it, which a clock that drifts moves alike; what it leaves to the `AFTER` steps behind it
counts, too:

    overhead_percent   all that probed steps take more, over all steps of the runs with probing
    runs_percent       wall time with probing over wall time without, per pair: host noise and all

The profile counts device kernels of one plain step with probing and of one of a second callable
with `probe_every=0`, and of a probed step, and adds up their time. The file is written after every
pair and after the profiles, and no pair begins that the time left would not hold.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import datetime
from datetime import timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile

import loka_compile
from loka_compile import _compat
from loka_compile import loka_backend
from loka_compile.binding import Binding
from loka_compile.files import write_text
from loka_compile.ledger import model_entries
from loka_compile.options import PROBE_STEPS
from loka_compile.probing import Late
from loka_compile.runtime import Runtime
from loka_compile.zoo.wukong import WukongConfig
from loka_compile.zoo.wukong import WukongDense

#: Embeddings of the `base` model beside the four made of the dense features.
EMBEDDINGS = {"tiny": 12, "small": 60, "base": 124}
DENSE = 64
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

    def pause(self, on: bool) -> None:
        """The schedule stands still meanwhile."""
        binding = self.binding
        if on and binding.late is not None:
            self.late, binding.late = binding.late, None
        elif not on and binding.late is None:
            binding.late = self.late


def timed(run: Run, steps: int, device: torch.device) -> tuple[float, list[float], list[bool]]:
    """Wall seconds of `steps` steps, milliseconds of each, and whether it was probed."""
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
    for _ in range(steps):
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


def kernels(run: Run, device: torch.device) -> dict[str, dict[str, float]]:
    """Device kernels (ops of ours on a CPU) of one step: how often each ran, its microseconds."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    if cuda:
        torch.cuda.synchronize()
    with profile(activities=activities) as found:
        run.step()
        if cuda:
            torch.cuda.synchronize()
    averages = found.key_averages()
    if cuda:
        # Not the host's calls, which are credited with the time of what they start.
        ran = [e for e in averages if e.device_type == DeviceType.CUDA]
        return {e.key: {"count": e.count, "us": e.self_device_time_total} for e in ran}
    ours = [e for e in averages if e.key.startswith("loka::")]
    return {e.key: {"count": e.count, "us": e.cpu_time_total} for e in ours}


def difference(one: dict[str, Any], other: dict[str, Any]) -> dict[str, list[float]]:
    """Kernels that do not run equally often: [in one, in the other]."""
    counts = {n: [held.get(n, {"count": 0})["count"] for held in (one, other)] for n in one | other}
    return {name: two for name, two in sorted(counts.items()) if two[0] != two[1]}


def total(profiled: dict[str, dict[str, float]], what: str) -> float:
    return sum(one[what] for one in profiled.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", default="base")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="`probe_every` of the run with it")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--inner", default="inductor")
    parser.add_argument("--tune", default="never", help="`auto` times kernels without a row")
    parser.add_argument("--budget-seconds", type=float, default=270)
    args = parser.parse_args()

    device = torch.device(args.device)
    real = _compat.why_no_fp8(device) is None
    torch.manual_seed(0)
    config = WukongConfig.of(args.scale)
    count = EMBEDDINGS[args.scale]
    model = WukongDense(config, count, DENSE).to(device, torch.bfloat16)
    inputs = (
        torch.randn(args.batch, count, config.d, device=device, dtype=torch.bfloat16),
        torch.randn(args.batch, DENSE, device=device, dtype=torch.bfloat16),
    )
    inputs[0].requires_grad_()
    options = {
        "mods": "on",
        "emulate": not real,
        "tune": args.tune,
        "inner": args.inner,
    }
    begun = time.perf_counter()
    deadline = begun + args.budget_seconds
    probing = Run(model, inputs, args.every, options)
    # Past the first probe after the plan, which compiles its variant.
    for _ in range(PROBE_STEPS + 1):
        probing.step()
    while not probing.next_is_probed():
        probing.step()
    probing.step()
    ready = time.perf_counter() - begun
    sites = loka_compile.plan_of(model).sites
    result: dict[str, Any] = {
        "env": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": _compat.device_key(device),
            "date": datetime.now(timezone.utc).date().isoformat(),
            "real_fp8": real,
        },
        "config": {k: str(v) for k, v in vars(args).items() if k != "out"},
        "early_steps": PROBE_STEPS,
        "sites": len(sites),
        "fp8_directions": sum(c.is_fp8 for s in sites.values() for c in s.directions.values()),
        "state_bytes": sum(
            held.nbytes for _, e in model_entries(model) for held in e.statistics.values()
        ),
        "seconds_to_compile": ready,
    }
    pairs: list[dict[str, Any]] = []
    longest = 0.0
    for number in range(args.pairs):
        if pairs and time.perf_counter() + longest > deadline:
            break
        started = time.perf_counter()
        pairs.append(pair(probing, args.steps, device, first=number % 2 == 0))
        longest = max(longest, time.perf_counter() - started)
        result |= summary(pairs, args.steps)
        write_text(args.out, json.dumps(result, indent=1) + "\n")

    # The first profile of a process starts the profiler, and may miss what runs meanwhile.
    kernels(probing, device)
    while probing.next_is_probed():
        probing.step()
    profiles = {"probing_plain_step": kernels(probing, device)}
    while not probing.next_is_probed():
        probing.step()
    profiles["probed_step"] = kernels(probing, device)
    plain = Run(model, inputs, 0, options)
    for _ in range(5):
        plain.step()
    profiles["plain"] = kernels(plain, device)
    result |= {
        "kernels": {n: total(k, "count") for n, k in profiles.items()},
        "device_us": {n: total(k, "us") for n, k in profiles.items()},
        "extra_kernels_on_plain_steps": total(profiles["probing_plain_step"], "count")
        - total(profiles["plain"], "count"),
        "kernels_that_differ": difference(profiles["plain"], profiles["probing_plain_step"]),
        "profiles": profiles,
    }
    write_text(args.out, json.dumps(result, indent=1) + "\n")
    kept_out = ("profiles", "kernels_that_differ", "extra_ms_of_probed")
    print(json.dumps({k: v for k, v in result.items() if k not in kept_out}, indent=1))


def summary(pairs: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    blocks = [b for p in pairs for b in zip(p["on_ms"], p["probed"], strict=True)]
    extra = [ms for each, probed in blocks for ms in extra_ms(each, probed)]
    probed_ms = [ms for each, probed in blocks for ms, was in zip(each, probed, strict=True) if was]
    with_probing = sum(sum(each) for each, _ in blocks)
    plain = [ms for each, probed in blocks for ms, was in zip(each, probed, strict=True) if not was]
    off = [ms for p in pairs for each in p["off_ms"] for ms in each]
    return {
        "overhead_percent": 100 * sum(extra) / (with_probing - sum(extra)),
        "runs_percent": [100 * (p["on_s"] / p["off_s"] - 1) for p in pairs],
        "steps": steps,
        "pairs": len(pairs),
        "probed_steps": len(extra),
        "extra_ms_of_probed": {
            "mean": statistics.fmean(extra),
            "median": statistics.median(extra),
            "each": [round(ms, 3) for ms in extra],
        },
        "probed_ms_median": statistics.median(probed_ms),
        "plain_ms_with_probing": statistics.median(plain),
        "plain_ms_without_probing": statistics.median(off),
    }


if __name__ == "__main__":
    main()
