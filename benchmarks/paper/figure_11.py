"""Figure 11: where a training step's time goes, by kind of kernel, before and after.

    python benchmarks/paper/figure_11.py --budget 300

One GPU, Wukong `base`, batch 4096: device time of kernels per step, grouped by their names. The
paper's bars are of 16 B200 with sparse and communication parts, which one GPU does not have.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from speed import WARMUP
from speed import Case
from speed import begin_peak
from speed import environment
from speed import peak
from speed import steps

from loka_compile.files import write_text

RESULTS = Path(__file__).parents[1] / "results"
ARMS = ("original", "bf16_mods", "loka", "torchao_tensorwise")
PAPER = {"note": "most of the gain is GEMM time, about 2x shorter; 16 B200, iteration 706"}
#: First match wins.
KINDS = (
    ("fused GEMM chain", r"fused_forward|linear_block_norm|_fused.*act"),
    ("FP8 GEMM", r"e4m3|e5m2|f8|fp8.*gemm|scaled_mm|deep_gemm|float8"),
    ("GEMM", r"gemm|nvjet|cutlass|triton_.*_mm|triton_tem|cublas|wgmma|bmm"),
    ("attention", r"flash|fmha|attention"),
    ("copies", r"memcpy|memset|copy_kernel|direct_copy"),
    ("norms, activations, quantisation, the rest of Inductor", r"triton_"),
)


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")


def breakdown(case: Case, device: torch.device, options: dict[str, Any], n: int) -> dict[str, Any]:
    torch._dynamo.reset()
    _, step = steps(case, device, options)
    for _ in range(WARMUP):
        step()
    begin_peak(device)
    step()
    memory = peak(device)
    cuda = device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        torch.cuda.synchronize()
        kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(n):
            step()
        if cuda:
            torch.cuda.synchronize()
    total: dict[str, float] = defaultdict(float)
    top: dict[str, float] = defaultdict(float)
    for event in profile.key_averages():
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        if spent:
            total[kind_of(event.key)] += spent / n / 1e3
            top[event.key[:100]] += spent / n / 1e3
    longest = sorted(top.items(), key=lambda item: -item[1])[:25]
    return {
        "ms_by_kind": dict(total),
        "ms": sum(total.values()),
        **memory,
        "longest": dict(longest),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="wukong")
    parser.add_argument("--scale", default="base")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--inner", default="inductor", help="eager: to try the script on a CPU")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds")
    parser.add_argument("--out", type=Path, default=RESULTS / "figure_11_h200.json")
    args = parser.parse_args()

    device = torch.device(args.device)
    options: dict[str, Any] = {} if args.inner == "inductor" else {"inner": args.inner}
    if device.type == "cpu":
        options["emulate"] = True
    result: dict[str, Any] = {"env": environment(device), "paper": PAPER, "rows": []}
    end = time.time() + args.budget
    for arm in args.arms:
        if time.time() > end:
            print("out of time")
            break
        case = Case(args.model, args.scale, args.batch, arm, "default", args.dtype, True)
        try:
            row = breakdown(case, device, options, args.steps)
        except Exception as e:  # one arm that cannot run must not take the others with it
            row = {"error": f"{type(e).__name__}: {e}"[:300]}
        result["rows"].append({"arm": arm, "model": args.model, "batch": args.batch, **row})
        write_text(args.out, json.dumps(result, indent=1) + "\n")
        print(arm, row.get("ms_by_kind") or row["error"])


if __name__ == "__main__":
    main()
