"""A study's units over several processes: who trains what, so that little is compiled twice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from loka_compile.train.study import PLAIN_ARMS
from loka_compile.train.study import StudyConfig
from loka_compile.train.study import Unit
from loka_compile.train.study import Worker

#: Units worth a compilation of their own under plain Inductor, which costs as much as many passes.
WORTH_COMPILING = 4


def shares(units: Sequence[Unit], jobs: int) -> list[list[Unit]]:
    """Units -> pieces of work, the longest first.

    What compiles anew for each seed is a piece of its own. What shares compiled code goes to the
    processes that are left, at least one for each code, by seed: what a stopped study has trained
    should make pairs.
    """
    alone = [[u] for u in units if u.arm not in PLAIN_ARMS]
    by_code: dict[str, list[Unit]] = {}
    for unit in units:
        if unit.arm in PLAIN_ARMS:
            by_code.setdefault(PLAIN_ARMS[unit.arm], []).append(unit)
    together = sum(map(len, by_code.values()))
    spare = max(len(by_code), jobs - len(alone))
    pieces = []
    for mine in by_code.values():
        mine.sort(key=lambda unit: unit.seed)
        count = min(spare * len(mine) // together, len(mine) // WORTH_COMPILING)
        size = -(-len(mine) // max(1, count))
        pieces += [mine[i : i + size] for i in range(0, len(mine), size)]
    return sorted(pieces, key=len, reverse=True) + alone


def in_processes(
    folder: Path,
    config: StudyConfig,
    pieces: list[list[Unit]],
    jobs: int,
    deadline: float | None,
) -> list[str]:
    """Train ``pieces`` in ``jobs`` processes; returns what went wrong."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    # Read when the children import torch.
    cores = max(1, (os.cpu_count() or 1) // min(jobs, len(pieces)))
    os.environ.setdefault("OMP_NUM_THREADS", str(cores))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(cores))
    pool = ProcessPoolExecutor(
        min(jobs, len(pieces)),
        multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(folder, config),
    )
    faults: list[str] = []
    with pool:
        futures = [pool.submit(_work, piece, deadline) for piece in pieces]
        for future in futures:
            try:
                faults += future.result()
            except BrokenProcessPool:
                faults.append("a worker process died (memory?); run again with fewer --jobs")
                break
    return faults


_WORKER: Worker | None = None


def _start(folder: Path, config: StudyConfig) -> None:
    global _WORKER
    _WORKER = Worker(folder, config)


def _work(piece: list[Unit], deadline: float | None) -> list[str]:
    assert _WORKER is not None
    return _WORKER.run(piece, deadline)
