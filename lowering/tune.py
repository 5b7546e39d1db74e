"""Measure the tiles of the fused forward at given shapes. Asked for, never done on the way.

Needs a CUDA device. A config that does not fit the device's shared memory is passed over. Many
shapes: compile first (`compile_pool.precompile` of `jobs`), in all cores; then a config costs
milliseconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from collections.abc import Iterable
from datetime import datetime
from datetime import timezone
from functools import partial
from typing import Any

import torch

from loka_compile.kernels.block_norm import block_of
from loka_compile.kernels.fused_forward import fused_forward
from loka_compile.kernels.tiles import Config
from loka_compile.kernels.tiles import candidates
from loka_compile.kernels.tiles import pointwise_block
from loka_compile.kernels.tiles import programs_of
from loka_compile.lowering.compile_pool import Job
from loka_compile.lowering.tile_store import Tile
from loka_compile.lowering.tile_store import TileKey
from loka_compile.lowering.tile_store import bucket

#: What is tuned: the chain in inference and in training, and the pointwise epilogues.
FORMS = ("y", "y8", "y+u", "y8+u+t", "y+p", "y+u+p", "y+m+p", "y+u+m+p")
#: Candidates that are timed again, longer.
_FINALS = 2


def block_in(form: str, n: int) -> int:
    return pointwise_block(n) if "p" in form.split("+") else block_of(n)


def launcher(m: int, n: int, k: int, form: str, device: torch.device) -> Callable[[Config], Any]:
    """A launch of `form` at a shape, on random operands, for any config."""
    parts = form.split("+")
    block = block_in(form, n)
    a = torch.randn(m, k, dtype=torch.float32, device=device).to(torch.float8_e4m3fn)
    w = torch.randn(n, k, dtype=torch.float32, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), dtype=torch.float32, device=device)
    kwargs: dict[str, Any] = {"block": block, "transposed": "t" in parts}
    if parts[0] == "y8":
        kwargs["out_scale"] = torch.full((), block**0.5 / 448.0, dtype=torch.float32, device=device)
    if "u" in parts:
        kwargs["save_dtype"] = torch.bfloat16
    if "p" in parts:
        kwargs |= {"norm": False, "act": "none" if "m" in parts else "silu"}
        kwargs["bias"] = torch.randn(n, device=device, dtype=torch.bfloat16)
    if "m" in parts:
        # The widest one: a factor and an addend.
        other = torch.randn(m, n, device=device, dtype=torch.bfloat16)
        kwargs |= {"mul": other, "addend": other}
    return lambda config: fused_forward(a, one, w, one, config=config, **kwargs)


def jobs(
    shapes: Iterable[tuple[int, int, int]], device: torch.device, forms: Iterable[str] = FORMS
) -> list[Job]:
    """What `tune` will launch for every (M, K, N) in every form."""
    programs = programs_of(device)
    return [
        (bucket(m), k, n, form, config)
        for m, k, n in shapes
        for form in forms
        for config in candidates(bucket(m), n, k, block_in(form, n), programs)
    ]


def graph_us(run: Callable[[], Any], calls: int = 20, replays: int = 3) -> float:
    """us of a call of `run`, by replaying a CUDA graph of some: rough, in a few milliseconds."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Not `torch.cuda.graph`: that empties the allocator's cache, which takes longer than the rest.
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        for _ in range(calls):
            run()
        graph.capture_end()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times) * 1e3 / calls


def tune(m: int, k: int, n: int, form: str, device: torch.device) -> Tile | None:
    """The fastest config of (M's bucket, N, K) in `form`; None where none runs."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench_cudagraph

    m = bucket(m)
    block = block_in(form, n)
    run = launcher(m, n, k, form, device)
    timed: list[tuple[float, int, Config]] = []
    for index, config in enumerate(candidates(m, n, k, block, programs_of(device))):
        try:
            timed.append((graph_us(partial(run, config)), index, config))
        except OutOfResources:
            continue
    if not timed:
        return None
    finals = []
    for _, index, config in sorted(timed)[:_FINALS]:
        repeats = [do_bench_cudagraph(partial(run, config), rep=4) for _ in range(3)]
        finals.append((statistics.median(repeats) * 1e3, index, config))
    us, _, config = min(finals)
    date = datetime.now(timezone.utc).date().isoformat()
    return Tile(TileKey.of(m, n, k, block, form, device), config, us, date)


def tune_all(
    shapes: Iterable[tuple[int, int, int]], device: torch.device, forms: Iterable[str] = FORMS
) -> Iterable[Tile]:
    """Tiles of every (M, K, N) in every form, one by one; buckets that fall together once."""
    seen = set()
    forms = tuple(forms)
    for m, k, n in shapes:
        for form in forms:
            key = TileKey.of(m, n, k, block_in(form, n), form, device)
            if key in seen:
                continue
            seen.add(key)
            tile = tune(m, n, k, form, device)
            if tile is not None:
                yield tile
