r"""Tune the fused forward's tiles and write them as the package's defaults for this device.

    python benchmarks/tune_tiles.py --out lowering/tiles_h200.json

Measures the shapes of bench_fused_forward at every M of --m. Rows already in the file stay unless
they are measured again; --seconds stops early, between shapes, and a second run goes on
(--missing). --keep also puts them where this user's launches find them, beside the package's own.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from bench_fused_forward import SHAPES

from loka_compile.lowering import tile_store
from loka_compile.lowering.compile_pool import precompile
from loka_compile.lowering.tile_store import TileKey
from loka_compile.lowering.tune import FORMS
from loka_compile.lowering.tune import block_in
from loka_compile.lowering.tune import jobs
from loka_compile.lowering.tune import tune


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--m", type=int, nargs="+", default=[256, 1024, 4096, 6144, 16384])
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--missing", action="store_true", help="skip what the file has")
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--keep", action="store_true", help="also in the user's cache")
    args = parser.parse_args()
    held = {row.key: row for row in tile_store.read_json(args.out)} if args.out.exists() else {}
    device, start = torch.device("cuda"), time.monotonic()

    def wanted(m: int, k: int, n: int, form: str) -> bool:
        key = TileKey.of(m, n, k, block_in(form, n), form, device)
        return not (args.missing and key in held)

    shapes = [(m, k, n) for m in args.m for k, n in SHAPES]
    todo = [(*shape, form) for form in args.forms for shape in shapes if wanted(*shape, form)]
    launches = [job for *shape, form in todo for job in jobs([tuple(shape)], device, [form])]
    count = precompile(launches, device, args.seconds / 2)
    print(f"{count} kernels compiled in {time.monotonic() - start:.0f} s", flush=True)
    for m, k, n, form in todo:
        if time.monotonic() - start > args.seconds:
            print("out of time: run again with --missing", flush=True)
            break
        row = tune(m, k, n, form, device)
        if row is not None:
            held[row.key] = row
            tile_store.write_json(held.values(), args.out)
            print(m, k, n, form, row.config, f"{row.us:.1f}", flush=True)
    if args.keep:
        tile_store.put(held.values())
    print(f"{len(todo)} asked for, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
