"""What a kernel costs at a site: looked up, else timed on the spot, else estimated.

`price` is of a direction as a whole: quantise, layout, kernel, and the epilogue where the site is
fused. `part_price` is of one of the parts that `parts.py` names. A time is the median under
CUDA-graph replay, taken at the M of the table's bucket. Without CUDA there is nothing to time: FP8
on a CPU is emulation.
"""

from __future__ import annotations

import functools
import logging
import statistics
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch

from loka_compile.errors import CostTableError
from loka_compile.lowering import chain
from loka_compile.lowering.cost_store import CostTable
from loka_compile.lowering.cost_store import default_table
from loka_compile.lowering.cost_table import CostKey
from loka_compile.lowering.cost_table import CostRow
from loka_compile.lowering.cost_table import today
from loka_compile.lowering.epilogue import is_pointwise
from loka_compile.lowering.estimator import product_of
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.parts import BOUNDED
from loka_compile.lowering.parts import MEMORY_BOUND
from loka_compile.lowering.parts import QUANTISE
from loka_compile.lowering.parts import Place
from loka_compile.lowering.parts import guess_us
from loka_compile.lowering.parts import is_gemm
from loka_compile.lowering.turn import turn
from loka_compile.lowering.workloads import ready_to_time

log = logging.getLogger("loka_compile")

#: Milliseconds that a graph of calls takes, and the most of them in it; how many replays one time
#: is a mean over, and how many such times.
REPLAY_MS, MOST_CALLS, REPLAYS, REPEATS = 2.0, 200, 5, 3

#: A separate epilogue kernel: launch, bytes per element (read, write, saved u), bytes per us.
EPILOGUE_US = 1.5
EPILOGUE_BYTES = 6
EPILOGUE_BYTES_PER_US = 3e6


@dataclass(frozen=True)
class Cost:
    """us: of the device. `source`: "measured" (now), "table", "estimated" or "failed" (then `note`
    is the error). host: microseconds that the host needs to start it, where that counts."""

    us: float | None
    source: str
    note: str = ""
    host: float = 0.0

    def at(self, share: float) -> float:
        """What counts where a microsecond of the device is worth `share`, one of the host the rest
        (`balance.py`). Only of a cost that is known."""
        assert self.us is not None
        return share * self.us + (1.0 - share) * self.host

    def times(self, factor: float) -> Cost:
        us = None if self.us is None else self.us * factor
        return Cost(us, self.source, self.note, self.host * factor)


def price(
    direction: str,
    kernel: str,
    place: Place,
    *,
    tune: str,
    handed: bool = False,
    table: CostTable | None = None,
) -> Cost | None:
    """The cost of one direction at `place`; None when nothing is known and nothing may be timed.

    tune: "auto" may time on a CUDA device, which adds a row to the table; "never" may not.
    """
    table = default_table() if table is None else table
    key = place.key(direction, kernel, handed)
    held = table.find(key)
    if held is not None:
        return Cost(held.us, "table")
    if is_pointwise(key.epilogue) and not chain.is_own(kernel):
        return _with_epilogue(direction, kernel, place, tune, handed, table)
    if tune == "auto" and place.device.type == "cuda":
        return measured(key, place.dtype, place.device, table)
    return estimated(key, table)


def _with_epilogue(
    direction: str, kernel: str, place: Place, tune: str, handed: bool, table: CostTable
) -> Cost | None:
    """The bare GEMM, whose rows all sites of the shape share, and the epilogue's pass after it."""
    bare = price(
        direction, kernel, replace(place, epilogue=""), tune=tune, handed=handed, table=table
    )
    if bare is None or bare.us is None:
        return bare
    size = place.dtype.itemsize
    # t is read again and y written anew; each operand is read by either form.
    moved = 2 * size * place.shape.m * place.shape.n
    return replace(bare, us=bare.us + EPILOGUE_US + moved / EPILOGUE_BYTES_PER_US)


def part_price(
    key: CostKey, dtype: torch.dtype, device: torch.device, *, tune: str, table: CostTable
) -> Cost | None:
    """The cost of one part. What moves memory always has one: measured, fitted or, without rows,
    by its bytes; it is timed only until a fit stands. A kernel's may be None, as in `price`.

    How Inductor quantises is not timed here: a dozen rules per shape, seconds of compiling each,
    and the bytes tell. `loka bench` times it, at sizes that stand for all.
    """
    held = table.find(key)
    if held is not None:
        return Cost(held.us, "table")
    moving = key.direction in MEMORY_BOUND
    fitted = estimated(key, table) if moving else None
    compiled = key.direction in (QUANTISE, BOUNDED) and key.library != "loka"
    if fitted is None and tune == "auto" and device.type == "cuda" and not compiled:
        cost = measured(key, dtype, device, table)
        if cost.us is not None or not moving:
            return cost
    if moving:
        return fitted or Cost(guess_us(key, dtype.itemsize), "estimated")
    return estimated(key, table)


def latency_us(
    direction: str, kernel: str, shape: GemmShape, dtype: torch.dtype, device: torch.device
) -> float | None:
    """Microseconds of the bare GEMM with its quantise steps, timed if need be; None on a CPU."""
    cost = price(direction, kernel, Place(shape, dtype, device), tune="auto")
    return None if cost is None else cost.us


def estimated(key: CostKey, table: CostTable) -> Cost | None:
    """By a fit to the kernel's rows at other shapes; None with too few of them.

    Without rows of the fused chain, the bare GEMM and one pass of the epilogue over its output
    stand for it.
    """
    fitted = table.fit(key)
    extra = 0.0
    part = is_gemm(key) or key.direction in MEMORY_BOUND
    if fitted is None and key.epilogue and not key.handed and not part:
        fitted = table.fit(replace(key, epilogue=""))
        extra = EPILOGUE_US + EPILOGUE_BYTES * key.m * key.n / EPILOGUE_BYTES_PER_US
    if fitted is None:
        return None
    return Cost(
        fitted.predict(*product_of(key.direction, key.m, key.k, key.n)) + extra, "estimated"
    )


#: What failed while it was timed is not tried again: key -> the error.
_FAILED: dict[CostKey, str] = {}


def timed(key: CostKey, dtype: torch.dtype, device: torch.device, many: bool = False) -> Cost:
    """Time `key`, for whoever keeps rows; "failed", and not tried again, where that raises."""
    if key in _FAILED:
        return Cost(None, "failed", _FAILED[key])
    try:
        return Cost(time_us(key, dtype, device, many), "measured")
    except Exception as error:
        _FAILED[key] = f"{type(error).__name__}: {error}".splitlines()[0]
        log.debug("could not time %s", key, exc_info=error)
        return Cost(None, "failed", _FAILED[key])


def keep(costs: Mapping[CostKey, Cost], table: CostTable) -> None:
    """Put what was measured into the table; one that cannot be written is no reason to stop."""
    rows = [CostRow(key, cost.us, today()) for key, cost in costs.items() if cost.us is not None]
    try:
        table.put(rows)
    except CostTableError as error:
        log.warning("loka: %s", error)


def measured(
    key: CostKey, dtype: torch.dtype, device: torch.device, table: CostTable, many: bool = False
) -> Cost:
    """Time `key` and keep the row."""
    cost = timed(key, dtype, device, many)
    if cost.us is not None:
        keep({key: cost}, table)
    return cost


def time_us(key: CostKey, dtype: torch.dtype, device: torch.device, many: bool = False) -> float:
    """Median microseconds of what `key` names, at the M of its bucket. CUDA only."""
    # A plan may be made inside a step: under autocast.
    with torch.no_grad(), torch.amp.autocast(device.type, enabled=False), torch.cuda.device(device):
        function, arguments = ready_to_time(key, dtype, device, many)
        function(*arguments)
        torch.cuda.synchronize(device)
        with turn(device):
            return replayed_us(lambda: function(*arguments))


def replayed_us(run: Callable[[], Any]) -> float:
    """Median over REPEATS of the mean time of `run` in a CUDA graph, in microseconds.

    Triton's `do_bench_cudagraph` captures anew for every repeat, and each capture empties the
    allocator's caches (and, by the version of torch, collects garbage over the whole process): a
    third of a second for a kernel of some microseconds, and the user's step has to allocate again.
    """
    stream = _side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        calls = max(1, min(int(REPLAY_MS / max(_elapsed_ms(run, 3) / 3, 1e-3)), MOST_CALLS))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Other threads of the user's program (one that pins memory, say) may go on meanwhile.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(calls):
                run()
        finally:
            graph.capture_end()
        graph.replay()
        times = [_elapsed_ms(graph.replay, REPLAYS) / (REPLAYS * calls) for _ in range(REPEATS)]
        del graph
    torch.cuda.current_stream().wait_stream(stream)
    return statistics.median(times) * 1e3


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for all: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)


def _elapsed_ms(run: Callable[[], Any], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
