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
    dense              the same of one run of `--dense` steps, one in `DENSE_EVERY` probed, as if it
                       were one in `--every`: more probed steps in the time

Before, each site is probed, and its error estimated, once: what is compiled or chosen at first
sight is not counted, as the compile is not (`first_ms`). The profile counts device kernels of one
plain step with probing, of one of a second callable with `probe_every=0`, and of a probed step, and
adds up their time. The file is written after every pair and after the profiles, and no pair begins
that the time left would not hold, the second callable's compile included.

`--profile-host` adds `host`: what a probed step takes the host more, function by function
(`host_profile.py`), before the second callable is compiled.

`--plan FILE` takes the plan from there, or writes it there once it is made; `--force KERNEL` runs
that kernel everywhere. Either leaves out the early probes, the plan made of them and a compile.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import torch
from host_profile import breakdown
from host_profile import table
from probed_steps import Run
from probed_steps import extra_ms
from probed_steps import pair
from probed_steps import timed
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile

import loka_compile
from loka_compile import _compat
from loka_compile.files import write_text
from loka_compile.ledger import model_entries
from loka_compile.options import PROBE_STEPS
from loka_compile.zoo.wukong import WukongConfig
from loka_compile.zoo.wukong import WukongDense

#: Embeddings of the `base` model beside the four made of the dense features.
EMBEDDINGS = {"tiny": 12, "small": 60, "base": 124}
DENSE = 64
#: Probed steps of a dense run: one in so many, more than what one of them may leave behind.
DENSE_EVERY = 25
#: Of the time to get ready, what the second callable may take, which finds all kernels compiled.
SECOND = 0.6


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
    parser.add_argument("--dense", type=int, default=1000, help="steps of the dense run")
    parser.add_argument("--plan", type=Path, help="taken from there, or written there")
    parser.add_argument("--force", help="this kernel everywhere, such as torch:tensorwise")
    parser.add_argument("--profile-host", action="store_true")
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
        **({"force": {"*": args.force}} if args.force else {}),
        **({"plan": args.plan} if args.plan and args.plan.exists() else {}),
    }
    begun = time.perf_counter()
    deadline = begun + args.budget_seconds
    probing = Run(model, inputs, args.every, options)
    for _ in range(PROBE_STEPS + 1):
        probing.step()
    # The first probe after the plan compiles its variant.
    probing.probe_in(1)
    probing.step()
    ready = time.perf_counter() - begun
    plan = loka_compile.plan_of(model)
    sites = plan.sites
    if args.plan and not args.plan.exists():
        plan.save(args.plan)
    result: dict[str, Any] = {
        "env": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": _compat.device_key(device),
            "date": datetime.now(timezone.utc).date().isoformat(),
            "real_fp8": real,
        },
        "config": {k: str(v) for k, v in vars(args).items() if k not in ("out", "plan")},
        "early_steps": PROBE_STEPS,
        "sites": len(sites),
        "fp8_directions": sum(c.is_fp8 for s in sites.values() for c in s.directions.values()),
        "state_bytes": sum(
            held.nbytes for _, e in model_entries(model) for held in e.statistics.values()
        ),
        "seconds_to_compile": ready,
        # Every second probe estimates an error, of one site after the other.
        "first_ms": [
            round(timed(probing, 1, device, every=1)[1][0], 3) for _ in range(2 * len(sites))
        ],
    }
    deadline -= SECOND * ready
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
    if args.dense:
        result["dense"] = dense(probing, args.dense, args.every, device)
        write_text(args.out, json.dumps(result, indent=1) + "\n")

    if args.profile_host:
        try:
            result["host"] = breakdown(probing, device)
        except Exception as error:
            # The rest is what was asked for first.
            print(f"no profile of the host: {type(error).__name__}: {error}")
        write_text(args.out, json.dumps(result, indent=1) + "\n")

    # The first profile of a process starts the profiler, and may miss what runs meanwhile.
    kernels(probing, device)
    probing.probe_in(2)
    profiles = {"probing_plain_step": kernels(probing, device)}
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
    if "host" in result:
        host = result["host"]
        print(json.dumps({k: v for k, v in host.items() if k not in ("functions", "ours")}))
        print("own time, more than a plain step:", table(host["functions"]), sep="\n")
        print("with what they call:", table(host["ours"]), sep="\n")
    kept_out = ("profiles", "kernels_that_differ", "extra_ms_of_probed", "host", "first_ms")
    print(json.dumps({k: v for k, v in result.items() if k not in kept_out}, indent=1))


def dense(run: Run, steps: int, every: int, device: torch.device) -> dict[str, Any]:
    """What a probed step takes more, of many, and what that would be of one in `every`."""
    _, each, probed = timed(run, steps, device, every=DENSE_EVERY)
    extra = extra_ms(each, probed)
    plain = statistics.median(ms for ms, was in zip(each, probed, strict=True) if not was)
    mean = statistics.fmean(extra)
    return {
        "overhead_percent": 100 * mean / (every * plain),
        "probed_steps": len(extra),
        "plain_ms": plain,
        "extra_ms_of_probed": {"mean": mean, "median": statistics.median(extra)},
    }


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
