r"""How long compiling takes: start-up against plain Inductor, our passes, recompiles.

    python benchmarks/bench_startup.py --out benchmarks/results/startup.json

    startup    seconds from torch.compile to the end of the first training step, in a new process
               whose compile cache is warm: plain Inductor, and backend="loka" with a pinned plan.
               Median of --repeats processes; imports and making the model are not in it
    passes     seconds of everything that we do to a graph of 300 linears (capture, names, Mods,
               fusion, dispatch, hand-over) with a plan in force, and what each pass takes
    patterns   milliseconds of a user's pattern (swish -> hard swish) over such a graph, and of the
               Mod that does the same; one of linear + ReLU over layers that all differ in width
               shows what traces cost
    recompiles Dynamo graphs over 50 batch sizes, dynamic=True, probing and the swap included

Runs on a GPU or on a CPU (there with emulated kernels; the ratio is not that of a GPU).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

FP8 = ("loka:rowwise", "torch:rowwise", "torch:rowwise")


def layers(count: int, width: int = 256) -> nn.Sequential:
    """`count` linears in chains of three: two fused, one bare behind a residual-free ReLU."""
    found: list[nn.Module] = []
    for i in range(count):
        found.append(nn.Linear(width, width))
        found += [nn.LayerNorm(width), nn.SiLU()] if i % 3 < 2 else [nn.ReLU()]
    return nn.Sequential(*found)


# -- start-up, in a process of its own ------------------------------------------------------------


def child(what: str, plan: Path, linears: int, device: torch.device) -> None:
    """Compile and run one step; print its seconds. `plan` is written where there is none."""
    import loka_compile

    torch.manual_seed(0)
    model = layers(linears).to(device).bfloat16()
    x = torch.randn(512, 256, device=device).bfloat16()
    emulate = device.type != "cuda"
    if what == "plain":
        loka_compile.apply_mods(model)
    if what == "plan":
        forced = {"mods": "on", "force": {"*": "torch:rowwise"}, "inner": "aot_eager"}
        compiled = torch.compile(model, backend="loka", options={**forced, "emulate": emulate})
        compiled(x).float().square().mean().backward()
        loka_compile.plan_of(model).save(plan)
        return
    begun = time.perf_counter()
    if what == "plain":
        compiled = torch.compile(model)
    else:
        options = {"plan": str(plan), "emulate": emulate}
        compiled = torch.compile(model, backend="loka", options=options)
    compiled(x).float().square().mean().backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    print(json.dumps({"seconds": time.perf_counter() - begun}))


def run_child(what: str, folder: Path, linears: int, device: str) -> float:
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    command = [sys.executable, __file__, "--child", what, "--plan", str(folder / "plan.json")]
    command += ["--linears", str(linears), "--device", device]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{what}: {done.stderr[-2000:]}")
    lines = done.stdout.strip().splitlines()
    return float(json.loads(lines[-1])["seconds"]) if lines else 0.0


def startup(linears: int, repeats: int, device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"linears": linears}
    with tempfile.TemporaryDirectory(prefix="loka-startup-") as name:
        folder = Path(name)
        run_child("plan", folder, linears, device)
        for what in ("plain", "loka"):
            found[f"{what}_cold_s"] = run_child(what, folder, linears, device)
        # In turns: both arms see the same machine.
        times: dict[str, list[float]] = {"plain": [], "loka": []}
        for _ in range(repeats):
            for what in times:
                times[what].append(run_child(what, folder, linears, device))
    for what, seconds in times.items():
        found[f"{what}_warm_s"] = statistics.median(seconds)
    found["ratio"] = found["loka_warm_s"] / found["plain_warm_s"]
    return found


# -- passes ---------------------------------------------------------------------------------------


def passes(linears: int, repeats: int = 3) -> dict[str, Any]:
    """Seconds of our own work on one graph, the least of `repeats`, and milliseconds per pass."""
    from loka_compile import variant
    from loka_compile.capture import capture
    from loka_compile.mod_set import ON
    from loka_compile.options import Options

    options = Options(mods="on")
    best: dict[str, Any] = {}

    def timed(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        begun, worked = time.perf_counter(), time.process_time()
        source = capture(gm, inputs, options)
        captured = time.perf_counter()
        kernels = tuple((s.name, FP8) for s in source.sites)
        rewritten = variant.rewrite(source, variant.Decided(ON, kernels), options)
        ended, worked = time.perf_counter(), time.process_time() - worked
        records = [*source.records, *rewritten.records]
        if not best or ended - begun < best["seconds"]:
            best.update(
                linears=len(source.sites),
                seconds=ended - begun,
                cpu_s=worked,
                capture_s=captured - begun,
                rewrite_s=ended - captured,
                pass_ms={r.name: round(r.ms, 2) for r in records},
                fused=len(rewritten.fused),
            )
        return gm

    with torch.device("meta"):
        model = layers(linears).bfloat16()
        x = torch.randn(512, 256, dtype=torch.bfloat16)
    for _ in range(repeats):
        torch._dynamo.reset()
        torch.compile(model, backend=timed, dynamic=False)(x)
    torch._dynamo.reset()
    return best


# -- patterns -------------------------------------------------------------------------------------


def patterns(linears: int, widths: int) -> dict[str, Any]:
    """Milliseconds of CPU per pass: the first graph of a process, and the same graph again."""
    import loka_compile
    from loka_compile.capture import capture
    from loka_compile.options import Options
    from loka_compile.passes import graph as g
    from loka_compile.passes.hard_swish import HARD_SWISH
    from loka_compile.passes.manager import PassContext
    from loka_compile.passes.manager import run_pass

    @loka_compile.pattern(example=lambda: (torch.randn(4, 8),))
    def swish(x: Any) -> Any:
        return F.silu(x)

    swish.replace(lambda x: F.hardswish(x))
    tensors = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6)

    @loka_compile.pattern(example=lambda: tensors)
    def linear_relu(x: Any, w: Any, b: Any) -> Any:
        return F.relu(F.linear(x, w, b))

    linear_relu.replace(lambda x, w, b: F.relu6(F.linear(x, w, b)))
    sizes = [64 + 8 * i for i in range(widths + 1)]
    with torch.device("meta"):
        tapered = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
        cases: dict[str, tuple[Any, nn.Module, int]] = {
            "mod": (HARD_SWISH, layers(linears), 256),
            "swish": (swish, layers(linears), 256),
            "linear_relu_of_all_widths": (linear_relu, nn.Sequential(*tapered), sizes[0]),
        }
    found: dict[str, Any] = {}
    for name, (given, model, width) in cases.items():

        def timed(
            gm: torch.fx.GraphModule, inputs: list[Any], name: str = name, given: Any = given
        ) -> Any:
            options = Options()
            source = capture(gm, inputs, options)
            begun = time.process_time()
            one = given.as_pass() if hasattr(given, "as_pass") else given
            spent = {"made_ms": (time.process_time() - begun) * 1e3}
            for when in ("first_ms", "again_ms"):
                mine, context = g.own_copy(source.gm), PassContext(options)
                begun = time.process_time()
                record = run_pass(one, mine, context, recompile=False)
                spent[when] = (time.process_time() - begun) * 1e3
            rounded = {k: round(v, 2) for k, v in spent.items()}
            found[name] = {"matches": record.matches, **rounded}
            return gm

        torch._dynamo.reset()
        x = torch.randn(512, width, device="meta")
        torch.compile(model, backend=timed, dynamic=False)(x)
    torch._dynamo.reset()
    return found


# -- recompiles -----------------------------------------------------------------------------------


def recompiles(sizes: int, device: torch.device, inner: str) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    import loka_compile

    torch._dynamo.reset()
    counters.clear()
    model = layers(6).to(device).bfloat16()
    options = {"mods": "on", "emulate": device.type != "cuda", "inner": inner, "probe_every": 0}
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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=["startup", "passes", "patterns", "recompiles"])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.child:
        child(args.child, args.plan, args.linears, device)
        return
    if args.out is None:
        parser.error("--out is needed")
    from loka_compile import _compat
    from loka_compile.files import write_text

    result: dict[str, Any] = {
        "env": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": _compat.device_key(device),
            "date": datetime.now(timezone.utc).date().isoformat(),
        }
    }
    if args.only in (None, "passes"):
        result["passes"] = passes(args.pass_linears)
        print(result["passes"], flush=True)
    if args.only in (None, "patterns"):
        result["patterns"] = patterns(args.pass_linears, widths=24)
        print(result["patterns"], flush=True)
    if args.only in (None, "recompiles"):
        inner = "inductor" if device.type == "cuda" else "aot_eager"
        result["recompiles"] = recompiles(50, device, inner)
        print(result["recompiles"], flush=True)
    if args.only in (None, "startup"):
        result["startup"] = startup(args.linears, args.repeats, args.device)
        print(result["startup"], flush=True)
    write_text(args.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
