"""Where the host's time goes in a probed step, beside a plain one.

wall_ms      what the host takes to start a step, without waiting for the device: of plain
             ones, of probed ones one behind the other, and of probed ones among plain ones,
             whose code and data the caches have forgotten
gc_ms        of those among plain ones, in Python's garbage collector
allocations  new memory that they had from the driver
functions    by time of their own: what a probed step takes more, in microseconds and calls
ours         by time with what they call: the same of this package's functions
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from probed_steps import Run

#: Plain steps ahead of a probed one that is to be as cold as in a run.
AHEAD = 20
REPEATS = 12
ROWS = 25

Function = tuple[str, int, str]


def breakdown(run: Run, device: torch.device, repeats: int = REPEATS) -> dict[str, Any]:
    collected = _Collector()
    plain = [_wall(run, device, probed=False) for _ in range(2 * repeats)]
    warm = [_wall(run, device, probed=True) for _ in range(repeats)]
    cold, spent, taken = [], [], 0
    for _ in range(repeats):
        _plain_steps(run, device)
        before = _allocations(device)
        with collected:
            cold.append(_wall(run, device, probed=True))
        taken += _allocations(device) - before
        spent.append(collected.ms)
    one, other = (_functions(run, device, probed, repeats) for probed in (False, True))
    return {
        "wall_ms": {
            "plain": statistics.median(plain),
            "probed_in_a_row": statistics.median(warm),
            "probed_among_plain": statistics.median(cold),
            "each_probed_among_plain": [round(ms, 3) for ms in cold],
        },
        "gc_ms": statistics.fmean(spent),
        "allocations": taken,
        "functions": _rows(one, other, own=True),
        "ours": _rows(one, other, own=False),
    }


class _Collector:
    """Milliseconds of garbage collection inside."""

    def __enter__(self) -> None:
        self.ms = 0.0
        gc.callbacks.append(self._saw)

    def __exit__(self, *_: Any) -> None:
        gc.callbacks.remove(self._saw)

    def _saw(self, phase: str, _: Any) -> None:
        now = 1e3 * time.perf_counter()
        self.ms += now if phase == "stop" else -now


def _wall(run: Run, device: torch.device, probed: bool) -> float:
    if probed:
        run.probe_in(1)
    _wait(device)
    begun = time.perf_counter()
    run.step()
    taken = 1e3 * (time.perf_counter() - begun)
    _wait(device)
    return taken


def _plain_steps(run: Run, device: torch.device) -> None:
    run.probe_in(2 * AHEAD)
    for _ in range(AHEAD):
        run.step()
    _wait(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _allocations(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_device_alloc", 0))


def _functions(
    run: Run, device: torch.device, probed: bool, repeats: int
) -> dict[Function, tuple[float, float, float]]:
    """function -> (calls, own us, us with what it calls) per step, backwards included."""
    found = cProfile.Profile()
    # In this thread, or nobody sees the backward.
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(repeats):
            _plain_steps(run, device)
            if probed:
                run.probe_in(1)
            found.enable()
            run.step()
            found.disable()
    entries = pstats.Stats(found).stats  # type: ignore[attr-defined]
    return {
        f: (calls / repeats, 1e6 * own / repeats, 1e6 * whole / repeats)
        for f, (_, calls, own, whole, _) in entries.items()
    }


def _rows(
    plain: dict[Function, tuple[float, float, float]],
    probed: dict[Function, tuple[float, float, float]],
    own: bool,
) -> list[dict[str, Any]]:
    nothing = (0.0, 0.0, 0.0)
    found = []
    for f in plain.keys() | probed.keys():
        if not own and not _is_ours(f):
            continue
        before, now = plain.get(f, nothing), probed.get(f, nothing)
        more = now[1] - before[1] if own else now[2] - before[2]
        found.append(
            {"what": _name(f), "us": round(more, 1), "calls": round(now[0] - before[0], 1)}
        )
    return sorted(found, key=lambda row: -abs(row["us"]))[:ROWS]


def _is_ours(f: Function) -> bool:
    parts = Path(f[0]).parts
    return any(part in parts for part in ("loka_compile", "kernels", "lowering"))


def _name(f: Function) -> str:
    """The last two parts of the path, and the function; names of Inductor's files say nothing."""
    file, line, function = f
    parts = Path(file).parts
    if file.startswith("~") or not parts:
        return function
    if len(Path(file).stem) > 40:
        return f"compiled code: {function}"
    return f"{'/'.join(parts[-2:])}:{line} {function}"


def table(rows: list[dict[str, Any]], most: int = 15) -> str:
    return "\n".join(f"{r['us']:9.1f} us {r['calls']:7.1f} x  {r['what']}" for r in rows[:most])
