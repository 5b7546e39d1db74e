r"""What each choice of the fused forward costs or gains, one at a time, on the shapes of Figure 13.

    python benchmarks/bench_fused_choices.py --out fused_choices.json

For every shape all candidate tiles with bf16 out (`tiles`); then, of the fastest four, the e4m3
output (`y8`), and of the fastest the kernel
    bare          without its epilogue
    launch        not started before the kernel ahead of it has ended (no programmatic launch)
    partials      with FP32 partial sums of a split
    flatten       with the loops over tiles and over K as one
    one_per_sm    with one program per SM
    rows          with one scale per row of A and of W
and the row quantiser alone (`quantize`), by values of a program and of a warp, and `dynamic`: both
in a row. Medians under CUDA-graph replay, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import astuple
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import torch
import triton
from bench_fused_forward import SHAPES
from triton.testing import do_bench_cudagraph

from loka_compile import _compat
from loka_compile.kernels import fused_forward as ff
from loka_compile.kernels import quantize_rows as qr
from loka_compile.kernels.block_norm import block_of
from loka_compile.kernels.room import dense
from loka_compile.kernels.tiles import Config
from loka_compile.kernels.tiles import candidates
from loka_compile.kernels.tiles import programs_of
from loka_compile.lowering.compile_pool import precompile
from loka_compile.lowering.compile_pool import run_all

E4M3 = torch.float8_e4m3fn
_RECIPE = ff.recipe_of
CHANGES: dict[str, dict[str, Any]] = {
    "again": {},
    "bare": {},
    "rows": {},
    "launch": {"PDL": False},
    "flatten": {"FLATTEN": True},
    "partials": {"partial_dtype": torch.float32},
    "one_per_sm": {"grid": None},
}


def choice(m: int, k: int, n: int, config: Config, what: str) -> Callable[[], Any]:
    """A launch of `config` with the choice `what` made otherwise."""
    device, block = torch.device("cuda"), block_of(n)
    a = torch.randn(m, k, device=device).to(E4M3)
    w = torch.randn(n, k, device=device).to(E4M3)
    a_scale = w_scale = torch.ones((), device=device)
    kwargs: dict[str, Any] = {"block": block, "config": config}
    if what == "rows":
        a_scale, w_scale = torch.ones(m, 1, device=device), torch.ones(n, 1, device=device)
    if what == "bare":
        kwargs |= {"norm": False, "act": "none"}
    if what == "y8":
        kwargs["out_scale"] = torch.full((), block**0.5 / 448.0, device=device)
    changes = CHANGES.get(what, {})

    def recipe(*signature: Any) -> Any:
        how = _RECIPE(*signature)
        call = how.call
        for name, value in changes.items():
            if name in call.constants:
                call.constants[name] = value
            elif name == "grid":
                call.grid = (min(call.grid[0], programs_of(device)), 1, 1)
            elif name == "partial_dtype" and how.partial is not None:
                how.partial = dense(how.partial[0], value)
        call.options["pdl"] = call.constants["PDL"]
        call.key = (call.key, tuple(changes))
        return how

    def run() -> Any:
        return ff.fused_forward(a, a_scale, w, w_scale, **kwargs)

    ff.RECIPES.clear()
    ff.recipe_of = recipe
    run()
    ff.recipe_of = _RECIPE
    return run


def once(*args: Any) -> None:
    choice(*args)


def time_us(make: Callable[..., Callable[[], Any]], *args: Any, rep: float = 4) -> float | None:
    """us of what `make(*args)` returns."""
    try:
        return float(do_bench_cudagraph(make(*args), rep=rep)) * 1e3
    except Exception as error:
        # A tile that does not compile or fit is a finding, not a reason to stop.
        print(f"  {type(error).__name__}: {str(error)[:100]}", flush=True)
        return None


def quantiser(m: int, k: int, values: int, per_warp: int) -> Callable[[], Any]:
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    qr._VALUES, qr._PER_WARP = values, per_warp
    qr.quantize_rows(x)
    return lambda: qr.quantize_rows(x)


def quantise_once(*args: Any) -> None:
    quantiser(*args)


def dynamic(m: int, k: int, n: int, config: Config) -> Callable[[], Any]:
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w, scale = torch.randn(n, k, device="cuda").to(E4M3), torch.ones(n, 1, device="cuda")

    def run() -> Any:
        q, a_scale = qr.quantize_rows(x)
        return ff.fused_forward(q, a_scale, w, scale, block=block_of(n), config=config)

    run()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--m", type=int, default=1024)
    args = parser.parse_args()
    device, start, m = torch.device("cuda"), time.monotonic(), args.m

    def told(what: str) -> None:
        print(f"{what}: {time.monotonic() - start:.0f} s", flush=True)

    def tiles(k: int, n: int) -> list[Config]:
        return candidates(m, n, k, block_of(n), programs_of(device))

    jobs = [(m, k, n, "y", config) for k, n in SHAPES for config in tiles(k, n)]
    told(f"{precompile(jobs, device, 60.0)} tiles compiled")
    rows = []
    for k, n in SHAPES:
        timed = []
        for config in tiles(k, n):
            us = time_us(choice, m, k, n, config, "again", rep=2)
            if us is not None:
                timed.append((us, astuple(config)))
        rows.append({"M": m, "K": k, "N": n, "tiles": sorted(timed)})
        print(k, n, rows[-1]["tiles"][:4], flush=True)
    told("tiles timed")
    calls = []
    for row in rows:
        k, n, timed = row["K"], row["N"], row["tiles"]
        calls += [(m, k, n, Config(*config), "y8") for _, config in timed[:4]]
        calls += [(m, k, n, Config(*timed[0][1]), what) for what in CHANGES]
    sweep = [(v, w) for v in (1024, 2048, 4096, 8192) for w in (256, 512, 1024)]
    ks = [256, 512, 2560, 7680]
    run_all(quantise_once, [(m, k, *pair) for k in ks for pair in sweep], 30.0)
    told(f"{run_all(once, calls, 60.0)} choices compiled")
    for row in rows:
        k, n = row["K"], row["N"]
        best = Config(*row["tiles"][0][1])
        row["y8"] = [(time_us(choice, m, k, n, Config(*c), "y8"), c) for _, c in row["tiles"][:4]]
        for what in CHANGES:
            row[what] = time_us(choice, m, k, n, best, what)
        row["dynamic"] = time_us(dynamic, m, k, n, best)
        shown = {key: round(v, 2) for key, v in row.items() if isinstance(v, float)}
        print(k, n, shown, row["y8"], flush=True)
    found = {
        k: sorted((time_us(quantiser, m, k, *pair) or 1e9, pair) for pair in sweep) for k in ks
    }
    env = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "device": _compat.device_key(device),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    made = {"env": env, "rows": rows, "quantize": found}
    args.out.write_text(json.dumps(made, indent=1) + "\n")
    for k, timed in found.items():
        print("quantize", k, timed, flush=True)
    told("all")


if __name__ == "__main__":
    main()
