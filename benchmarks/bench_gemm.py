r"""Every library x recipe x direction over the GEMMs of large recommendation models.

    python benchmarks/bench_gemm.py --out benchmarks/results/gemm_h200.json --budget-seconds 480

Times are medians under CUDA-graph replay, in microseconds:
    gemm_us   operands quantised and scales laid out beforehand
    total_us  bf16 operands; quantised by our Triton kernels (TorchAO: its own arithmetic, compiled
              by Inductor), scales laid out, then the kernel, in one graph
    rel_error norm of the error against the FP32 product of the bf16 operands, over its norm
`M, K, N` are the linear's: x (M, K), w (N, K). The contraction is K, N, M in fwd, dgrad, wgrad.

Every library has a process of its own; they compile side by side and take turns on the device, one
cell at a time. A kernel that ends or hangs its process costs one row: the next process goes on
behind it. --every and --libraries make a short run, such as an oracle for bench_regret.py. Rows are
kept beside --out as they come (<out>.<library>.jsonl), and a second run does only what is missing;
--fresh starts over.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import threading
import time
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

from gemm_library import HIGH
from gemm_library import cell_of
from gemm_library import failed
from gemm_library import read

WORKER = Path(__file__).with_name("gemm_library.py")
#: Seconds that one process may be silent: a JIT compiler at work, or a hang.
SILENCE = 120.0


def drive(library: str, rows: Path, deadline: float, every: int) -> None:
    """Run processes for `library` until it is done, or out of time."""
    while time.time() < deadline:
        command = [sys.executable, str(WORKER), "--library", library, "--rows", str(rows)]
        command += ["--every", str(every)]
        child = subprocess.Popen([*command, "--deadline", str(deadline)])
        size, silent_since = -1, time.time()
        while child.poll() is None:
            time.sleep(0.2)
            now = rows.stat().st_size if rows.exists() else 0
            if now != size:
                size, silent_since = now, time.time()
            if time.time() - silent_since > SILENCE or time.time() > deadline + 30:
                child.kill()
                child.wait()
        last = read(rows)[-1:]
        print(f"{library}: process ended with {child.returncode}", flush=True)
        if last and "started" in last[0]:
            cell = tuple(last[0]["started"])
            how = f"its process ended with status {child.returncode} (crash or {SILENCE:g} s hang)"
            if time.time() < deadline:
                with rows.open("a") as out:
                    out.write(json.dumps(failed(cell, how)) + "\n")
                continue
        if child.returncode == 4:
            continue
        return


def rows_of(out: Path, library: str) -> Path:
    return out.with_suffix(f".{library}.jsonl")


def write(out: Path, libraries: list[str]) -> dict[str, Any]:
    import torch
    import triton

    from loka_compile import _compat
    from loka_compile.lowering.cost_table import version_of
    from loka_compile.lowering.libraries import LIBRARIES

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    held: dict[str, Any] = {"env": {}, "rows": []}
    if out.exists():
        held = json.loads(out.read_text())
        env = held["env"]
        if (env["torch"], env["device"]) != (torch.__version__, _compat.device_key(device)):
            held = {"env": {}, "rows": []}
    kept = [row for path in sorted(out.parent.glob(f"{out.stem}.*.jsonl")) for row in read(path)]
    # Of libraries that this run was not asked for, what the file has stays.
    table = {cell_of(row): row for row in [*held["rows"], *kept] if "started" not in row}
    # Of our own kernels only the forward is timed.
    versions = held["env"].get("libraries", {}) | {
        name: version_of(name, "fwd") for name in LIBRARIES if name in libraries
    }
    result = {
        "env": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "device": _compat.device_key(device),
            "libraries": versions,
            "quantise": "Triton; torchao: Inductor, dynamic shapes",
            "date": datetime.now(timezone.utc).date().isoformat(),
        },
        "rows": list(table.values()),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def show(result: dict[str, Any]) -> None:
    """Per library and recipe: rows, rows that ran, and the reasons why others did not."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        groups.setdefault((row["library"], row["recipe"]), []).append(row)
    for (library, recipe), rows in groups.items():
        ran = [row for row in rows if row["available"]]
        reasons = sorted({row["reason"] for row in rows if not row["available"]})
        print(f"{library}:{recipe}: {len(ran)} of {len(rows)} rows", *reasons[:6], sep="\n    ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-seconds", type=float, default=480)
    parser.add_argument("--libraries", nargs="+", help="default: all, high precision first")
    parser.add_argument("--every", type=int, default=1, help="only each n-th shape")
    parser.add_argument("--fresh", action="store_true", help="forget rows measured before")
    args = parser.parse_args()
    deadline = time.time() + args.budget_seconds
    from loka_compile.lowering.libraries import LIBRARIES

    libraries = args.libraries or [HIGH, *LIBRARIES]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    drivers = []
    for library in libraries:
        rows = rows_of(args.out, library)
        if args.fresh:
            rows.unlink(missing_ok=True)
            args.out.unlink(missing_ok=True)
        drivers.append(threading.Thread(target=drive, args=(library, rows, deadline, args.every)))
        drivers[-1].start()
    for driver in drivers:
        driver.join()
    result = write(args.out, libraries)
    show(result)


if __name__ == "__main__":
    main()
