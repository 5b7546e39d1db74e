r"""What probing costs: paired runs of a training step with and without it, and a profile of both.

    python benchmarks/bench_probe_overhead.py --out benchmarks/results/probe_overhead_h200.json

Wukong's dense part, forward and backward to parameters and input, bf16, one plan (made by the first
8 steps). The same parameters run under two compiled callables that differ in `probe_every` alone:
100 and 0. A pair is `--steps` steps of each, in turning blocks of `BLOCK`, so that a clock that
drifts moves both alike. `overhead_percent` is the median over pairs of the ratio of wall times;
`from_steps` is the same from the medians of plain and probed steps. The profile counts device
kernels of one plain step of each, and of a probed one, and adds up their time. The file is written
after every pair, and no pair begins that the time left would not hold.
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
from loka_compile.ledger import model_entries
from loka_compile.options import PROBE_STEPS
from loka_compile.probe.schedule import Schedule
from loka_compile.zoo.wukong import WukongConfig
from loka_compile.zoo.wukong import WukongDense

#: Embeddings of the `base` model beside the four made of the dense features.
EMBEDDINGS = {"tiny": 12, "small": 60, "base": 124}
DENSE = 64
#: Steps of one callable before the other has its turn.
BLOCK = 100


class Run:
    """One compiled callable, counting its steps."""

    def __init__(self, model: torch.nn.Module, inputs: Any, every: int, options: Any) -> None:
        self.model, self.inputs = model, inputs
        self.schedule = Schedule(every)
        self.call: Callable[..., Any] = torch.compile(
            model, backend="loka", options={**options, "probe_every": every}
        )
        self.done = 0

    def step(self) -> None:
        embeddings, dense = self.inputs
        for p in self.model.parameters():
            p.grad = None
        embeddings.grad = None
        self.call(embeddings, dense).float().mean().backward()
        self.done += 1

    def to_probed(self) -> bool:
        """Is the next step a probed one."""
        return self.schedule.next_after(self.done) == self.done + 1


def timed(run: Run, steps: int, device: torch.device) -> dict[str, Any]:
    """Wall seconds of `steps` steps, and milliseconds of plain and probed ones."""
    cuda = device.type == "cuda"
    kinds, marks = [], []

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
        kinds.append(run.to_probed())
        run.step()
        mark()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    each = [a.elapsed_time(b) if cuda else 1e3 * (b - a) for a, b in pairwise(marks)]
    return {
        "seconds": seconds,
        "plain_ms": [ms for ms, probed in zip(each, kinds, strict=True) if not probed],
        "probed_ms": [ms for ms, probed in zip(each, kinds, strict=True) if probed],
    }


def blocks(first: Run, second: Run, steps: int, device: torch.device) -> list[dict[str, Any]]:
    """`timed` of so many steps of each, in turns."""
    found: list[dict[str, Any]] = [{"seconds": 0.0, "plain_ms": [], "probed_ms": []} for _ in "ab"]
    done = 0
    while done < steps:
        count = min(BLOCK, steps - done)
        order = [(0, first), (1, second)]
        for index, run in order[:: -1 if (done // BLOCK) % 2 else 1]:
            one = timed(run, count, device)
            for name in found[index]:
                found[index][name] += one[name]
        done += count
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
    probing = Run(model, inputs, 100, options)
    # Past the first probe after the plan, which compiles its variant.
    while probing.done <= probing.schedule.probed_in(0):
        probing.step()
    plain = Run(model, inputs, 0, options)
    for _ in range(5):
        plain.step()
    ready = time.perf_counter() - begun

    # The first profile of a process starts the profiler, and may miss what runs meanwhile.
    kernels(plain, device)
    while probing.to_probed():
        probing.step()
    profiles = {"plain": kernels(plain, device), "probing_plain_step": kernels(probing, device)}
    while not probing.to_probed():
        probing.step()
    profiles["probed_step"] = kernels(probing, device)

    sites = loka_compile.plan_of(model).sites
    fixed = {
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
        "kernels": {n: total(k, "count") for n, k in profiles.items()},
        "device_us": {n: total(k, "us") for n, k in profiles.items()},
        "extra_kernels_on_plain_steps": total(profiles["probing_plain_step"], "count")
        - total(profiles["plain"], "count"),
        "kernels_that_differ": difference(profiles["plain"], profiles["probing_plain_step"]),
        "seconds_to_compile": ready,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    pairs: list[dict[str, Any]] = []
    longest = 0.0
    for number in range(args.pairs):
        if pairs and time.perf_counter() + longest > deadline:
            break
        begun = time.perf_counter()
        turns = [("on", probing), ("off", plain)][:: 1 if number % 2 else -1]
        names, runs = zip(*turns, strict=True)
        found = dict(zip(names, blocks(*runs, args.steps, device), strict=True))
        longest = max(longest, time.perf_counter() - begun)
        pairs.append(found)
        result = {**fixed, **summary(pairs, args.steps), "profiles": profiles}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "profiles"}, indent=1))


def summary(pairs: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    ratios = [100 * (p["on"]["seconds"] / p["off"]["seconds"] - 1) for p in pairs]
    off = statistics.median(ms for p in pairs for ms in p["off"]["plain_ms"])
    on = statistics.median(ms for p in pairs for ms in p["on"]["plain_ms"])
    probed_ms = [ms for p in pairs for ms in p["on"]["probed_ms"]]
    share = len(probed_ms) / (steps * len(pairs))
    return {
        "overhead_percent": statistics.median(ratios),
        "overhead_percent_per_pair": ratios,
        "steps": steps,
        "pairs": len(pairs),
        "from_steps": {
            "plain_ms_without_probing": off,
            "plain_ms_with_probing": on,
            "probed_ms_median": statistics.median(probed_ms) if probed_ms else None,
            "probed_ms_mean": statistics.fmean(probed_ms) if probed_ms else None,
            "probed_share": share,
            "overhead_percent": (
                100 * share * (statistics.median(probed_ms) / off - 1) if probed_ms else None
            ),
        },
    }


if __name__ == "__main__":
    main()
