r"""Every Triton kernel once, at one shape, under compute-sanitizer.

    python benchmarks/sanitize.py --out benchmarks/results/sanitizer_h200.json
    compute-sanitizer --tool memcheck python benchmarks/sanitize.py --kernel fused_forward

The first runs the second for every kernel and tool (memcheck, racecheck), each in a process of its
own, and keeps the summary. compute-sanitizer is looked for in PATH, in CUDA_HOME and in the usual
place; --sanitizer names it. Shapes have ragged tails in every direction, since that is where a mask
can be wrong, and each result is compared with its plain-torch reference.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import as_completed
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

from sanitize_cases import CASES

TOOLS = ("memcheck", "racecheck")
SECONDS = 240.0
SHOWN = ("kernel", "tool", "clean", "summary", "seconds")


def find_sanitizer(given: str | None) -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    places = [given, shutil.which("compute-sanitizer"), f"{home}/bin/compute-sanitizer"]
    places.append(f"{home}/compute-sanitizer/compute-sanitizer")
    return next((p for p in places if p and Path(p).exists()), None)


def check(sanitizer: str, tool: str, kernel: str) -> dict[str, Any]:
    """One process under one tool -> its row; `clean`: no error, no hazard, and the right result."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", "99"]
    command += [sys.executable, __file__, "--kernel", kernel]
    # Without torch's caching allocator an access past a tensor is past its allocation.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, env=environment
        )
        code, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as stopped:
        code, output = -1, f"{stopped.stdout or ''}\nno end within {SECONDS:g} s"
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", output)
    clean = code == 0 and bool(summary) and re.search(r"SUMMARY: 0 ", summary[-1]) is not None
    return {
        "kernel": kernel,
        "tool": tool,
        "clean": clean,
        "summary": summary[-1] if summary else "",
        "exit_code": code,
        "seconds": round(time.monotonic() - start, 1),
        "output": "" if clean else output[-2000:],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", choices=list(CASES), help="run this one, here, and stop")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tool", choices=TOOLS, nargs="+", default=list(TOOLS))
    parser.add_argument("--only", choices=list(CASES), nargs="+", default=list(CASES))
    parser.add_argument("--sanitizer")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time")
    args = parser.parse_args()
    import torch

    if args.kernel:
        torch.manual_seed(0)
        CASES[args.kernel]()
        torch.cuda.synchronize()
        print(f"{args.kernel}: agrees with its reference")
        return 0
    if args.out is None:
        parser.error("--out or --kernel is needed")
    sanitizer = find_sanitizer(args.sanitizer)
    if sanitizer is None:
        print("compute-sanitizer was not found: install the CUDA toolkit's, or give --sanitizer")
        return 2
    import triton

    from loka_compile import _compat
    from loka_compile.files import write_text

    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout
    env = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "device": _compat.device_key(torch.device("cuda")),
        "sanitizer": " ".join(version.split()[-6:]),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    rows = []
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [
            pool.submit(check, sanitizer, tool, kernel)
            for kernel in args.only
            for tool in args.tool
        ]
        for run in as_completed(runs):
            rows.append(run.result())
            print({k: rows[-1][k] for k in SHOWN}, flush=True)
            rows.sort(key=lambda row: (row["tool"], row["kernel"]))
            # As they come: what ran is kept when the time is up.
            write_text(args.out, json.dumps({"env": env, "rows": rows}, indent=1) + "\n")
    return 0 if all(row["clean"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
