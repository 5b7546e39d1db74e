r"""What the backward kernels issue per value, counted in their machine code for Hopper. No GPU.

    python benchmarks/count_issued.py --out benchmarks/results/issued_sm90.json

Each of the four schedulers of a processor issues one instruction a cycle for 32 threads, but those
of the ALU (integers, comparisons, selections, conversions) every other cycle.
    issued, alu     instructions a value, in all and on the ALU: of a loop, and of a tile's end
    cycles          of a processor for 1,000 values, at least: the larger of issue and ALU
    us_4096x4096    the same of 4096 x 4096 values on 132 processors at 1.755 GHz, without a wait
bf16 in, e4m3 (tensorwise: e5m2) out, Hard Swish, blocks of 256, no gain, nothing to mask.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
import compile_sm90

PROCESSORS, GHZ = 132, 1.755
#: Of the ALU; the rest issue at the full rate, or are few.
ALU = ("LOP3", "PRMT", "SHF", "SEL", "FSEL", "ISETP", "FSETP", "VIMNMX", "IMNMX", "FMNMX", "HMNMX2",
       "F2FP", "IADD3", "VIADD", "LEA", "PLOP3", "P2R", "R2P", "SGXT")  # fmt: skip


def instructions(cubin: bytes) -> list[tuple[int, str]]:
    """(address, instruction) of each."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "-sass", file.name], capture_output=True, text=True, check=True
        )
    found = re.findall(r"^\s+/\*([0-9a-f]{4,5})\*/\s+([^;]+)", done.stdout, re.M)
    return [(int(address, 16), text.strip()) for address, text in found]


def target(text: str) -> int | None:
    found = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
    return int(found.group(1), 16) if found else None


def main_loop(code: list[tuple[int, str]]) -> tuple[int, int]:
    """First and last address of the longest loop."""
    back = [(to, at) for at, text in code if (to := target(text)) is not None and to < at]
    return max(back, key=lambda ends: ends[1] - ends[0])


def counted(code: list[tuple[int, str]], first: int, last: int) -> Counter[str]:
    """By name, without a predicate."""
    names = (re.sub(r"^@!?U?P\w+\s+", "", text) for at, text in code if first <= at <= last)
    return Counter(re.split(r"[\s.]", name)[0] for name in names)


def per_value(counts: Counter[str], values: float) -> dict[str, float]:
    return {
        "issued": sum(counts.values()) / values,
        "alu": sum(counts[name] for name in ALU) / values,
    }


def row(name: str, code: list[tuple[int, str]], values: int, turns: int) -> dict[str, Any]:
    """values: a thread's in a turn of the loop. turns: of a tile, if its end is within the loop,
    where the last of several branches is taken in the last turn."""
    first, last = main_loop(code)
    every = counted(code, first, last)
    end: Counter[str] = Counter()
    jump = next((at for at, text in code if first < at < last and "BRX" in text), None)
    if jump is not None:
        # One branch a turn: in a tile each of them once.
        ends = [to for at, text in code if jump < at < last and (to := target(text)) and to > at]
        end = counted(code, jump + 16, max(ends) - 16)
        every = every - end
    parts = [per_value(every, values), per_value(end, values * turns)]
    issued, alu = (sum(part[key] for part in parts) for key in ("issued", "alu"))
    cycles = max(issued, 2 * alu) * 1000 / 128
    us = cycles / 1000 * 4096 * 4096 / PROCESSORS / GHZ * 1e-3
    return {
        "kernel": name, "loop": parts[0], "end": parts[1], "issued": issued, "alu": alu,
        "cycles": cycles, "us_4096x4096": us,
        "most": dict((every + end).most_common(12)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    kernels = [
        # 32 rows of 256 and 128 threads a turn, four turns a tile.
        ("blocks", compile_sm90.backward_blocks(), 64, 4),
        ("amax", compile_sm90.backward(second=False, gain=False), 16, 1),
        # The turning after the loop is not counted.
        ("quantize", compile_sm90.backward(second=True, gain=False), 32, 1),
    ]
    rows = [
        row(name, instructions(kernel.asm["cubin"]), values, turns)
        for name, kernel, values, turns in kernels
    ]
    for one in rows:
        print({key: round(v, 1) if isinstance(v, float) else v for key, v in one.items()})
    env = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "device": "sm90, compiled for it, not run",
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    result = {"env": env, "rows": rows}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
