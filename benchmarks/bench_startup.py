r"""How long compiling takes: start-up against plain Inductor, our passes, recompiles.

    python benchmarks/bench_startup.py --out benchmarks/results/startup.json

    startup    seconds from torch.compile to the end of the first training step, less what a later
               step takes, in a new process whose compile cache is warm: plain Inductor, and
               backend="loka" with a pinned plan. Torch's imports and making the model come before;
               ours are in it. Plain Inductor gets what the Mods make of the model, in torch's own
               modules. Pairs of processes in turns; the median of their ratios, by the wall and by
               the CPU (user + system), and of whole processes
    passes     seconds of everything that we do to a graph of 300 linears (capture, names, Mods,
               fusion, dispatch, hand-over) with a plan in force, and what each pass takes
    patterns   milliseconds of a user's pattern (swish -> hard swish) over such a graph, and of the
               Mod that does the same; one of linear + ReLU over layers that all differ in width
               shows what traces cost
    recompiles Dynamo graphs over 50 batch sizes, dynamic=True, probing and the swap included

`--profile FOLDER` profiles the start-up instead, one warm process per arm. Runs on a GPU or on a
CPU (there with emulated kernels, whose code takes longer to compile and to load than a GPU's, and
on one thread: those of a pool burn CPU time while they wait).
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import os
import platform
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import torch
from startup_passes import layers
from startup_passes import passes
from startup_passes import patterns

PARTS = ("passes", "patterns", "recompiles", "startup")

#: Of every GEMM of the model that is started.
KERNELS = "torch:rowwise"


# -- start-up, in a process of its own ------------------------------------------------------------


def child(
    what: str, plan: Path, linears: int, device: torch.device, profile: Path | None = None
) -> None:
    """Compile and run one step; print its seconds. `plan` is written where there is none."""
    # Plain Inductor needs them as much; ours are in the clock.
    import torch._inductor.compile_fx as inductor

    torch.manual_seed(0)
    model = layers(linears, modded=what == "plain").to(device).bfloat16()
    emulate = device.type != "cuda"
    if emulate:
        torch.set_num_threads(1)
    x = torch.randn(512, 256, device=device).bfloat16()
    if what == "plan":
        import loka_compile

        forced = {"mods": "on", "force": {"*": KERNELS}, "inner": "aot_eager"}
        compiled = torch.compile(model, backend="loka", options={**forced, "emulate": emulate})
        compiled(x).float().square().mean().backward()
        loka_compile.plan_of(model).save(plan)
        return
    inner = {"inner_s": 0.0, "inner_cpu_s": 0.0}
    inductor.compile_fx = _timed(inductor.compile_fx, inner)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    watch = cProfile.Profile()
    if profile is not None:
        watch.enable()
    begun, worked = time.perf_counter(), time.process_time()
    if what == "plain":
        compiled = torch.compile(model)
    else:
        import loka_compile.backend

        imported = time.perf_counter() - begun, time.process_time() - worked
        options = {"plan": str(plan), "emulate": emulate}
        compiled = torch.compile(model, backend="loka", options=options)
    result = compiled(x).float().square().mean()
    called = time.perf_counter()
    result.backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    ended, worked = time.perf_counter(), time.process_time() - worked
    found = {"wall_s": ended - begun, "cpu_s": worked, **inner, "backward_s": ended - called}
    if profile is None:
        # Emulated kernels take their time at every step: that is not start-up.
        again = [_step(compiled, x) for _ in range(3)]
        found["step_s"], found["step_cpu_s"] = map(statistics.median, zip(*again, strict=True))
        found["wall_s"] -= found["step_s"]
        found["cpu_s"] -= found["step_cpu_s"]
    else:
        watch.disable()
        with (profile / f"{what}.txt").open("w") as out:
            for order in ("cumtime", "tottime"):
                pstats.Stats(watch, stream=out).sort_stats(order).print_stats(120)
    if what != "plain":
        records = torch._dynamo.utils.counters["aot_autograd"]
        found["cache_hits"] = records.get("autograd_cache_hit", 0)
        found["import_s"], found["import_cpu_s"] = imported
    print(json.dumps(found))


def _step(compiled: Any, x: torch.Tensor) -> tuple[float, float]:
    """Seconds of one training step, by the wall and by the CPU."""
    begun, worked = time.perf_counter(), time.process_time()
    compiled(x).float().square().mean().backward()
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - begun, time.process_time() - worked


def _timed(compile_fx: Any, spent: dict[str, float]) -> Any:
    """`compile_fx`, which adds what its calls take to `spent`."""
    depth = itertools.count()

    def timed(*args: Any, **kwargs: Any) -> Any:
        if next(depth):  # It calls itself, with patched settings in force.
            return compile_fx(*args, **kwargs)
        begun, worked = time.perf_counter(), time.process_time()
        try:
            return compile_fx(*args, **kwargs)
        finally:
            spent["inner_s"] += time.perf_counter() - begun
            spent["inner_cpu_s"] += time.process_time() - worked

    return timed


def run_child(
    what: str, folder: Path, linears: int, device: str, profile: Path | None = None
) -> dict[str, float]:
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    # As installed: byte code of ours lies on the disk, as torch's does.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, __file__, "--child", what, "--plan", str(folder / "plan.json")]
    command += ["--linears", str(linears), "--device", device]
    command += [] if profile is None else ["--profile", str(profile)]
    begun, before = time.perf_counter(), os.times()
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    after = os.times()
    if done.returncode:
        raise RuntimeError(f"{what}: {done.stderr[-2000:]}")
    lines = done.stdout.strip().splitlines()
    found: dict[str, float] = json.loads(lines[-1]) if lines else {}
    found["process_s"] = time.perf_counter() - begun
    found["process_cpu_s"] = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return found


ARMS = ("plain", "loka")

#: Ratio -> of which clock: from torch.compile on, and of the whole process, imports and all.
CLOCKS = {
    "ratio": "wall_s",
    "ratio_cpu": "cpu_s",
    "process_ratio": "process_s",
    "process_ratio_cpu": "process_cpu_s",
}


def startup(
    linears: int, repeats: int, seconds: float, device: str, profile: Path | None = None
) -> dict[str, Any]:
    found: dict[str, Any] = {"linears": linears, "kernels": KERNELS}
    with tempfile.TemporaryDirectory(prefix="loka-startup-") as name:
        folder = Path(name)
        run_child("plan", folder, linears, device)
        for what in ARMS:
            found[f"{what}_cold_s"] = run_child(what, folder, linears, device)["wall_s"]
        # The second process still writes caches (Triton's, byte code).
        for what in ARMS:
            run_child(what, folder, linears, device)
        if profile is not None:
            profile.mkdir(parents=True, exist_ok=True)
            return {what: run_child(what, folder, linears, device, profile) for what in ARMS}
        pairs: list[tuple[dict[str, float], dict[str, float]]] = []
        begun = time.monotonic()
        # In turns: both arms see the same machine.
        while len(pairs) < repeats or time.monotonic() - begun < seconds:
            pairs.append(
                (
                    run_child("plain", folder, linears, device),
                    run_child("loka", folder, linears, device),
                )
            )
    return {**found, **compared(pairs)}


def compared(pairs: list[tuple[dict[str, float], dict[str, float]]]) -> dict[str, Any]:
    """Medians of both arms, and of the ratios of the pairs, by each clock."""
    found: dict[str, Any] = {"pairs": len(pairs)}
    for arm, runs in zip(ARMS, zip(*pairs, strict=True), strict=True):
        found[arm] = {k: statistics.median(run[k] for run in runs) for k in runs[0]}
    for name, clock in CLOCKS.items():
        ratios = [loka[clock] / plain[clock] for plain, loka in pairs]
        found[name] = statistics.median(ratios)
        found[f"{name}_of_pairs"] = [round(r, 3) for r in ratios]
    return found


# -- recompiles -----------------------------------------------------------------------------------


def recompiles(sizes: int, device: torch.device, inner: str) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    import loka_compile

    torch._dynamo.reset()
    counters.clear()
    model = layers(6).to(device).bfloat16()
    options = {"mods": "on", "emulate": device.type != "cuda", "inner": inner, "probe_every": 0}
    # How long a plan takes to make is not what is measured.
    options["tune"] = "never"
    compiled = torch.compile(model, backend="loka", options=options, dynamic=True)
    for rows in range(2, sizes + 2):
        x = torch.randn(16 + rows, 256, device=device).bfloat16()
        compiled(x).float().square().mean().backward()
    plan = loka_compile.plan_of(model)
    return {
        "batch_sizes": sizes,
        "graphs": counters["stats"]["unique_graphs"],
        "fp8_sites": sum(
            any(k != "high_precision" for k in s.kernels) for s in plan.sites.values()
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--linears", type=int, default=24, help="of the model that is started")
    parser.add_argument("--pass-linears", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3, help="pairs of processes, at least")
    parser.add_argument("--seconds", type=float, default=30.0, help="of pairs, where more fit")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, help="parts; the others stay as the file has them"
    )
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="write no --out")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.child:
        child(args.child, args.plan, args.linears, device, args.profile)
        return
    if args.profile is not None:
        found = startup(args.linears, args.repeats, args.seconds, args.device, args.profile)
        print(json.dumps(found, indent=1))
        return
    if args.out is None:
        parser.error("--out is needed")
    from loka_compile import _compat
    from loka_compile.files import write_text

    env = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": _compat.device_key(device),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    inner = "inductor" if device.type == "cuda" else "aot_eager"
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "passes": lambda: passes(args.pass_linears),
        "patterns": lambda: patterns(args.pass_linears, widths=24),
        "recompiles": lambda: recompiles(50, device, inner),
        "startup": lambda: startup(args.linears, args.repeats, args.seconds, args.device),
    }
    result = earlier(args.out, env) if args.only else {}
    result["env"] = env
    for part in args.only or parts:
        result[part] = parts[part]()
        print(part, json.dumps(result[part], indent=1), flush=True)
        write_text(args.out, json.dumps(result, indent=1) + "\n")


def earlier(path: Path, env: dict[str, str]) -> dict[str, Any]:
    """What the file holds already, where it was measured with the same versions and device."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    same = all(found.get("env", {}).get(k) == v for k, v in env.items() if k != "date")
    return found if same else {}


if __name__ == "__main__":
    main()
