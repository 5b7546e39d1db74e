r"""What making a plan takes, by phase: the seconds that one training step waits for it.

    python benchmarks/bench_plan.py --out benchmarks/results/plan_h200.json
    python benchmarks/bench_plan.py --out /tmp/plan.json --model dhen --dtype float32
    python benchmarks/bench_plan.py --out /tmp/plan.json --linears 300 --shapes 40

Eight probed steps of a model of the zoo (or of a stack of linears), then the step at whose start
the plan is made. Twice, each in a process of its own: with an empty cache of the user's (no cost
rows but the shipped ones, no first uses), and again with what the first one left. Beside the
phases: how many kernels were tried, timed and quantified, how many were to choose from, and what
share of the plan's time the device was at work (`device_share`; the rest is choosing).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn

PROBED = 8
#: Phases that wait for the device.
ON_DEVICE = ("first uses", "timing", "errors")


def stack(linears: int, shapes: int, device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    """`linears` linears of about so many shapes, two of three before a norm and an activation."""
    widths = [256 + 128 * (i % shapes) for i in range(linears + 1)]
    layers: list[nn.Module] = []
    for i, (k, n) in enumerate(itertools.pairwise(widths)):
        layers.append(nn.Linear(k, n))
        layers += [nn.LayerNorm(n), nn.SiLU()] if i % 3 else []
    with torch.device(device):
        return nn.Sequential(*layers).to(device), torch.randn(1, widths[0])


def made(args: argparse.Namespace, device: torch.device) -> tuple[nn.Module, list[torch.Tensor]]:
    if args.linears:
        model, one = stack(args.linears, args.shapes, device)
        inputs = [one.expand(args.batch, -1).contiguous().normal_()]
    else:
        from loka_compile.model_sites import zoo_model

        model, inputs_of = zoo_model(f"{args.model}:{args.scale}", device)
        inputs = list(inputs_of(args.batch))
    dtype = getattr(torch, args.dtype)
    inputs = [t.to(dtype) if t.is_floating_point() else t for t in inputs]
    inputs[0].requires_grad_()
    return model.to(dtype), inputs


def child(args: argparse.Namespace) -> dict[str, Any]:
    from loka_compile import plan_of
    from loka_compile import planner
    from loka_compile.lowering.settle import Spent

    device = torch.device(args.device)
    spent: list[Spent] = []

    class Kept(Spent):
        def __init__(self) -> None:
            super().__init__()
            spent.append(self)

    planner.Spent = Kept  # type: ignore[misc]
    model, inputs = made(args, device)
    options = {"mods": "on", "inner": args.inner, "emulate": device.type != "cuda"}
    compiled = torch.compile(model, backend="loka", options=options)
    steps = []
    for _ in range(PROBED + 1):
        begun = time.perf_counter()
        result = compiled(*inputs)
        result.float().square().mean().backward()
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        steps.append(time.perf_counter() - begun)
    sites = plan_of(model).sites
    choices = [site.choice(d) for site in sites.values() for d in ("fwd", "dgrad", "wgrad")]
    return {
        "sites": len(sites),
        "shapes": len({(s.M, s.K, s.N, bool(s.fused)) for s in sites.values()}),
        "fp8_directions": sum(c.is_fp8 for c in choices),
        "plans": [
            {
                "seconds": {k: round(v, 3) for k, v in one.seconds.items()},
                "counts": dict(one.counts),
                "device_share": round(
                    sum(one.seconds[phase] for phase in ON_DEVICE) / one.seconds["plan"], 3
                ),
            }
            for one in spent
        ],
        # Its own compile is not the plan's: the new graph is compiled in this step, too.
        "step_with_plan_s": round(steps[-1], 3),
        "probed_step_s": round(min(steps[:-1]), 4),
    }


def run(args: argparse.Namespace, cache: Path) -> dict[str, Any]:
    env = {**os.environ, "LOKA_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, *sys.argv, "--child"], env=env, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"the run ended with status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default="wukong", help="of the zoo")
    parser.add_argument("--scale", default="base")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--linears", type=int, default=0, help="a stack of so many instead")
    parser.add_argument("--shapes", type=int, default=40, help="of that stack")
    parser.add_argument("--inner", default="aot_eager", help="what compiles: not what is measured")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args)))
        return
    if args.out is None:
        parser.error("--out is needed")
    from loka_compile import _compat
    from loka_compile.files import write_text
    from loka_compile.lowering.libraries import LIBRARIES

    device = torch.device(args.device)
    result: dict[str, Any] = {
        "env": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": _compat.device_key(device),
            "libraries": {
                name: one.version()
                for name, one in LIBRARIES.items()
                if one.why_unavailable(device) is None
            },
            "date": datetime.now(timezone.utc).date().isoformat(),
        },
        "model": f"{args.linears} linears" if args.linears else f"{args.model}:{args.scale}",
        "batch": args.batch,
        "dtype": args.dtype,
    }
    with tempfile.TemporaryDirectory(prefix="loka-plan-") as name:
        for when in ("cold", "warm"):
            result[when] = run(args, Path(name))
            print(when, json.dumps(result[when], indent=1), flush=True)
    write_text(args.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
