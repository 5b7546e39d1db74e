r"""The fused chain on its own: FP8 Linear -> BlockNorm -> Hard Swish against compiled bf16.

    python benchmarks/bench_fused_forward.py --out benchmarks/results/fused_forward_h200.json

All times are medians under CUDA-graph replay, in microseconds, taken in one process, with the tiles
that a launch takes by itself (`benchmarks/tune_tiles.py` measures them):
    bf16_layernorm_silu_us  torch.compile of Linear(bias) + LayerNorm + SiLU, bf16
    bf16_mods_us            torch.compile of Linear + BlockNorm + Hard Swish, bf16
    fused_us                the kernel, e4m3 input with a static scale, weights quantised, bf16 out
    fused_fp8_out_us        the same with e4m3 out (static scale)
    fused_dynamic_us        bf16 input, quantised by row inside the measured region, bf16 out
    fused_train_us          e4m3 out, transposed copy, u (bf16) and r saved
    fused_blockwise_us      scales per 1 x 128 of the input and 128 x 128 of the weight, bf16 out
    bare_fp8_us             the same kernel without its epilogue, bf16 out
    best_library_fp8_us     the fastest of torch._scaled_mm tensorwise and rowwise, bf16 out

Everything is compiled beforehand in processes side by side; --seconds stops between shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

# The processes that compile beforehand are as many as there are cores.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import triton
from torch import nn
from triton.testing import do_bench_cudagraph

from loka_compile import BlockNorm
from loka_compile import _compat
from loka_compile.kernels.block_norm import block_of
from loka_compile.kernels.fused_forward import FusedOutput
from loka_compile.kernels.fused_forward import fused_forward
from loka_compile.kernels.fused_forward import fused_forward_ref
from loka_compile.kernels.quantize import quantize_rowwise
from loka_compile.kernels.quantize import quantize_tensorwise
from loka_compile.kernels.quantize_blockwise import quantize_blocks
from loka_compile.kernels.quantize_blockwise import quantize_groups
from loka_compile.kernels.quantize_rows import quantize_rows
from loka_compile.kernels.tiles import Config
from loka_compile.kernels.tiles import config_for
from loka_compile.lowering import tile_store  # noqa: F401  (a launch asks it for tiles)
from loka_compile.lowering.compile_pool import run_all

E4M3 = torch.float8_e4m3fn
#: (K, N) of Figure 13.
SHAPES = [
    (256, 256), (7680, 256), (512, 512), (7680, 512), (4096, 2048), (4096, 2560), (2048, 4096),
    (2560, 4096), (256, 7680),
]  # fmt: skip
REPEATS = 3


def time_us(run: Callable[[], Any], rep: int = 4) -> float:
    times = [do_bench_cudagraph(run, rep=rep) for _ in range(REPEATS)]
    return statistics.median(times) * 1e3


def best(run: Callable[[Config], Any], tried: list[Config]) -> tuple[float, Config | None]:
    """(us, config) of the fastest candidate that runs."""
    timed = []
    for config in tried:
        try:
            run(config)
            timed.append((do_bench_cudagraph(lambda c=config: run(c), rep=2) * 1e3, config))
        except triton.runtime.errors.OutOfResources:
            continue
    timed.sort(key=lambda pair: pair[0])
    finals = [(time_us(lambda c=c: run(c), rep=10), c) for _, c in timed[:2]]
    return min(finals, key=lambda pair: pair[0])


#: Column -> what it measures.
Runs = dict[str, Callable[[], Any]]


def baselines(x: torch.Tensor, n: int) -> tuple[Runs, torch.Tensor]:
    """What runs in bf16, compiled, and the weight of the form with Mods."""
    k, kwargs = x.shape[1], {"device": x.device, "dtype": torch.bfloat16}
    norm = nn.LayerNorm(n, **kwargs)
    original = nn.Sequential(nn.Linear(k, n, **kwargs), norm, nn.SiLU())
    free = nn.Linear(k, n, bias=False, **kwargs)
    mods = nn.Sequential(free, BlockNorm(n), nn.Hardswish())
    torch._dynamo.reset()
    compiled = [torch.compile(model, dynamic=False) for model in (original, mods)]
    runs: Runs = {
        "bf16_layernorm_silu_us": lambda: compiled[0](x),
        "bf16_mods_us": lambda: compiled[1](x),
    }
    return runs, free.weight.detach()


def kernels(x: torch.Tensor, weight: torch.Tensor) -> tuple[Runs, Runs, Callable[[], float]]:
    """Ours; the libraries'; and the relative error of ours against FP64."""
    (m, k), n, device = x.shape, weight.shape[0], x.device
    block = block_of(n)
    a, a_scale = quantize_tensorwise(x, E4M3)
    w, w_scale = quantize_tensorwise(weight, E4M3)
    ar, ar_scale = quantize_rowwise(x, E4M3)
    wr, wr_scale = quantize_rowwise(weight, E4M3)
    ag, ag_scale = quantize_groups(x, E4M3)
    wg, wg_scale = quantize_blocks(weight, E4M3)
    out_scale = torch.full((), block**0.5 / 448.0, device=device)

    def fused(**kwargs: Any) -> FusedOutput:
        return fused_forward(a, a_scale, w, w_scale, block=block, **kwargs)

    def dynamic() -> FusedOutput:
        q, scale = quantize_rows(x)
        return fused_forward(q, scale, wr, wr_scale, block=block)

    def product(left: Any, left_scale: Any, right: Any, right_scale: Any) -> torch.Tensor:
        return torch._scaled_mm(
            left, right.t(), left_scale, right_scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def error() -> float:
        want, _, _ = fused_forward_ref(a, a_scale, w, w_scale, block=block)
        return float((fused().y.double() - want).norm() / want.norm())

    config = config_for(m, n, k, block, "y", device)
    train = {"out_scale": out_scale, "save_dtype": torch.bfloat16, "transposed": True}
    ours: Runs = {
        "fused_us": fused,
        "fused_fp8_out_us": lambda: fused(out_scale=out_scale),
        "fused_dynamic_us": dynamic,
        "fused_train_us": lambda: fused(**train),
        "fused_blockwise_us": lambda: fused_forward(
            ag, ag_scale, wg, wg_scale, block=block, groups=True
        ),
        "bare_fp8_us": lambda: fused(norm=False, act="none", config=config),
    }
    theirs: Runs = {
        "tensorwise": lambda: product(a, a_scale, w, w_scale),
        "rowwise": lambda: product(ar, ar_scale, wr, wr_scale.t()),
    }
    return ours, theirs, error


def compile_all(m: int, k: int, n: int, part: int) -> None:
    """Run what is measured once: bf16 in part 0, our kernels in part 1."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        if part == 0:
            runs, _ = baselines(x, n)
        else:
            runs, _, _ = kernels(x, torch.randn(n, k, device="cuda", dtype=torch.bfloat16))
        for run in runs.values():
            run()


def measure(m: int, k: int, n: int, device: torch.device) -> dict[str, Any]:
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    row: dict[str, Any] = {"M": m, "K": k, "N": n, "block": block_of(n)}
    with torch.no_grad():
        bf16, weight = baselines(x, n)
        ours, theirs, error = kernels(x, weight)
        for name, run in {**bf16, **ours}.items():
            row[name] = time_us(run)
        row["library_us"] = {name: time_us(run) for name, run in theirs.items()}
        row["best_library_fp8_us"] = min(row["library_us"].values())
        row["rel_error"] = error()
    for form, name in (("y", "config"), ("y8", "fp8_config"), ("y8+u+t", "train_config")):
        row[name] = vars(config_for(m, n, k, row["block"], form, device))
    row["speedup"] = row["bf16_layernorm_silu_us"] / min(row["fused_us"], row["fused_fp8_out_us"])
    row["dynamic_speedup"] = row["bf16_layernorm_silu_us"] / row["fused_dynamic_us"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--m", type=int, nargs="+", default=[1024, 256, 4096, 6144, 16384])
    parser.add_argument("--seconds", type=float, default=500.0)
    args = parser.parse_args()
    device, start = torch.device("cuda"), time.monotonic()
    shapes = [(m, k, n) for m in args.m for k, n in SHAPES]
    count = run_all(
        compile_all, [(*shape, part) for part in (0, 1) for shape in shapes], args.seconds / 2
    )
    print(f"{count} of {2 * len(shapes)} compiled in {time.monotonic() - start:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for m, k, n in shapes:
        if time.monotonic() - start > args.seconds:
            print("out of time", flush=True)
            break
        rows.append(measure(m, k, n, device))
        shown = {key: round(v, 2) for key, v in rows[-1].items() if isinstance(v, float)}
        print(m, k, n, shown, tuple(rows[-1]["config"].values()), flush=True)
    result = {
        "env": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "device": _compat.device_key(device),
            "date": datetime.now(timezone.utc).date().isoformat(),
        },
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for m in args.m:
        for name in ("speedup", "dynamic_speedup"):
            of_m = [r[name] for r in rows if r["M"] == m]
            if of_m:
                print(m, name, "geometric mean", f"{statistics.geometric_mean(of_m):.3f}")
    print(f"{time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
