"""Compile what DeepGEMM needs for a model, side by side, before anything is timed.

    python benchmarks/compile_deep_gemm.py --model wukong:base --batch 1024 4096 --processes 14

It compiles each kernel with nvcc when a shape is first used, for seconds, and keeps the result on
disk (DG_JIT_CACHE_DIR, ~/.deep_gemm by default). A model has dozens of them: `bench_dispatch.py`
would wait for them one after the other. Which kernel a shape takes depends on M too, so that each
batch has its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch
from gemm_library import DIRECTIONS
from gemm_library import quantised_operand

from loka_compile.lowering.libraries import LIBRARIES
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.recipes import BLOCKWISE
from loka_compile.model_sites import places_of
from loka_compile.model_sites import zoo_model

Cell = tuple[int, int, int, str]


def cells(model: str, batches: list[int], device: torch.device) -> list[Cell]:
    """(M, K, N, direction) of all sites, each once, the slowest to fill with numbers last."""
    dense, inputs_of = zoo_model(model)
    dense = dense.to(torch.bfloat16)
    library, found = LIBRARIES["deep_gemm"], set()
    for rows in batches:
        inputs = [
            x.to(torch.bfloat16).requires_grad_() if x.is_floating_point() else x
            for x in inputs_of(rows)
        ]
        for one in places_of(dense, inputs, device):
            m, k, n = one.place.shape.m, one.place.shape.k, one.place.shape.n
            for direction in DIRECTIONS:
                if library.why_not(BLOCKWISE.name, direction, GemmShape(m, k, n)) is None:
                    found.add((m, k, n, direction))
    return sorted(found, key=lambda cell: (cell[0] * (cell[1] + cell[2]), cell))


def compile_one(cell: Cell, device: torch.device) -> None:
    """One call, on numbers of no meaning."""
    m, k, n, direction = cell
    library, rule = LIBRARIES["deep_gemm"], BLOCKWISE.gemm(direction)
    assert rule is not None
    a, b = {"fwd": ((m, k), (n, k)), "dgrad": ((m, n), (k, n)), "wgrad": ((n, m), (k, m))}[
        direction
    ]

    def operand(size: tuple[int, int], which: object, *, rows_up: bool) -> tuple[object, object]:
        values = torch.ones(size, dtype=torch.bfloat16, device=device)
        return quantised_operand(values, which, rows_up=rows_up)

    qa, sa = operand(a, rule.a, rows_up=False)
    qb, sb = operand(b, rule.b, rows_up=True)
    library.call(*library.prepare(qa, sa, qb, sb, rule), rule, torch.bfloat16)
    torch.cuda.synchronize(device)


def share(args: argparse.Namespace) -> int:
    """What one process does; how many cells failed."""
    device, failed = torch.device("cuda"), 0
    for cell in cells(args.model, args.batch, device)[args.share :: args.processes]:
        begun = time.monotonic()
        try:
            compile_one(cell, device)
        except Exception as error:
            failed += 1
            print(*cell, f"{type(error).__name__}: {error}"[:200], flush=True)
            continue
        print(*cell, f"{time.monotonic() - begun:.1f} s", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="wukong:base")
    parser.add_argument("--batch", type=int, nargs="+", default=[4096])
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.share is not None:
        return share(args)
    why = LIBRARIES["deep_gemm"].why_unavailable(torch.device("cuda"))
    if why is not None:
        print(why)
        return 2
    begun = time.monotonic()
    command = [sys.executable, __file__, *sys.argv[1:], "--share"]
    running = [subprocess.Popen([*command, str(i)]) for i in range(args.processes)]
    failed = sum(process.wait() != 0 for process in running)
    print(f"{time.monotonic() - begun:.0f} s; processes with failures: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
