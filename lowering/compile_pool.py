"""Compile many kernels at once, in processes of their own, before one process measures them.

A kernel takes Triton seconds on one core, and a search wants hundreds. What a worker compiles lies
in Triton's cache on disk; the process that measures finds it there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import as_completed
from multiprocessing import get_context
from typing import Any

import torch

from loka_compile.kernels.block_norm import count_blocks
from loka_compile.kernels.tiles import Config
from loka_compile.kernels.tiles import programs_of
from loka_compile.kernels.tiles import whole_tiles

#: (M, K, N, form, config) of one launch of the fused forward; see `tune.launcher`.
Job = tuple[int, int, int, str, Config]


def run_all(
    function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], seconds: float = 300.0
) -> int:
    """`function(*call)` for all calls, in as many processes as there are cores, for as long as
    there is time; how many went well. `function` launches a kernel once, as it will be launched:
    only that compiles exactly what will be asked for. It must be importable by name."""
    wanted = list(calls)
    workers = max(1, min((os.cpu_count() or 1) - 2, len(wanted)))
    # Spawned: a forked process cannot use its parent's CUDA context.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    futures = [pool.submit(function, *call) for call in wanted]
    done = 0
    try:
        for future in as_completed(futures, timeout=seconds):
            done += future.exception() is None
    except TimeoutError:
        pass
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return done


def precompile(jobs: Iterable[Job], device: torch.device, seconds: float = 300.0) -> int:
    """Compile the fused forward for the distinct ones of `jobs`; how many were compiled."""
    return run_all(_compile, [(job, device) for job in distinct(jobs, device)], seconds)


def distinct(jobs: Iterable[Job], device: torch.device) -> list[Job]:
    """One job of all those that Triton compiles to the same code: it tells apart integers that are
    1 or multiples of 16, no others."""
    from loka_compile.lowering.tune import block_in

    programs = programs_of(device)
    found: dict[Any, Job] = {}
    for job in jobs:
        m, k, n, form, config = job
        block = block_in(form, n)
        blocks = count_blocks(n, block)
        full = whole_tiles(-(-m // config.block_m) * blocks, config.split_k, programs)
        sizes = (m, n, k, block, blocks, full)
        kinds = tuple((size == 1, size % 16 == 0) for size in sizes)
        found.setdefault((form, config, block, full > 0, n % block == 0, kinds), job)
    return list(found.values())


def _compile(job: Job, device: torch.device) -> None:
    from triton.runtime.errors import OutOfResources

    from loka_compile.lowering.tune import launcher

    m, k, n, form, config = job
    try:
        launcher(m, n, k, form, device)(config)
    except OutOfResources:
        # Compiled all the same; the measuring process meets it too, and passes it over.
        return
