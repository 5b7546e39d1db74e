"""A study's units over several processes: who trains what, so that little is compiled twice."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from loka_compile import _compat
from loka_compile.train.study import PLAIN_ARMS
from loka_compile.train.study import StudyConfig
from loka_compile.train.study import Unit
from loka_compile.train.study import Worker

#: How long a process waits for the one that compiles first, before it compiles too.
WAIT_SECONDS = 180.0
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
    cores = os.cpu_count() or 1
    each = str(max(1, cores // min(jobs, len(pieces))))
    os.environ.setdefault("OMP_NUM_THREADS", each)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    threads = None
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = each
        threads = max(1, cores // len({code_of(piece[0]) for piece in pieces}))
    pool = ProcessPoolExecutor(
        min(jobs, len(pieces)),
        multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(folder, config, threads),
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


def code_of(unit: Unit) -> str:
    """The name of the compiled code that a unit runs, or most of it."""
    return PLAIN_ARMS.get(unit.arm, unit.arm)


class FirstAlone:
    """Whoever comes first compiles ``code``, on ``threads``; the others wait until it has run once.

    They then find the code, or most of its kernels, in Inductor's cache on disk. ``first`` says
    whether this process is the one. A lock that dies with its process is released.
    """

    def __init__(self, folder: Path, code: str, threads: int | None = None) -> None:
        self.path, self.threads = folder / "compiling" / code, threads
        self.first = False
        self._stream: IO[str] | None = None

    def __enter__(self) -> FirstAlone:
        try:
            import fcntl
        except ImportError:
            return self
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = stream = open(self.path, "a+")
        with contextlib.suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            stream.seek(0)
            self.first = not stream.read()
            if self.first and self.threads is not None:
                _compat.compile_in_processes(self.threads)
            if not self.first:
                self._close()
            return self
        until = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            time.sleep(0.2)
        self._close()
        return self

    def release(self) -> None:
        """The code is there: let the others go on."""
        if self._stream is not None:
            self._stream.write("compiled")
            self._close()

    def _close(self) -> None:
        if self._stream is not None:
            # Closing releases the lock.
            self._stream.close()
            self._stream = None

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            self.release()
        self._close()


_WORKER: Worker | None = None
_THREADS: int | None = None


def _start(folder: Path, config: StudyConfig, threads: int | None) -> None:
    global _WORKER, _THREADS
    _WORKER, _THREADS = Worker(folder, config), threads


def _work(piece: list[Unit], deadline: float | None) -> list[str]:
    assert _WORKER is not None
    with FirstAlone(_WORKER.folder, code_of(piece[0]), _THREADS) as turn:
        faults = _WORKER.run(piece[:1], deadline, turn.release)
    return faults + _WORKER.run(piece[1:], deadline)
