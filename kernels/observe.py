"""Update of the Probe's state from one batch, in four launches and without a host sync.

    1 rows      per row: finite or not; partial counts and the maximum
    2 columns   per feature: sums and squares about the first row, exact zeros, in FP64
    3 merge     Chan's merge into the moments; candidate rows into the reservoir
    4 counters  the scalars, after all that reads them

The definition is `probe.statistics.observe_ref`; the state is described there. No atomics: the same
batch gives the same state on every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka_compile.kernels.call import Call
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import Recipes
from loka_compile.kernels.launch import kind
from loka_compile.kernels.room import allocator
from loka_compile.kernels.room import dense

#: Scalars before the ring of maxima; their order is that of `probe.statistics`.
_HEAD = 8
_ROW_PROGRAMS = 1024
#: Programs that columns are split over: enough to fill a device where features are few.
_COLUMN_PROGRAMS = 1024
#: Partial sums that are read at once.
_CHUNK = 16


@triton.jit
def _uniform(counter):
    """As `statistics._uniform`: int64 -> fp64 in [0, 1)."""
    h = (counter * 0x9E3779B1 + 0x7F4A7C15) & 0xFFFFFFFF
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & 0xFFFFFFFF
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & 0xFFFFFFFF
    return (h ^ (h >> 16)).to(tl.float64) / 4294967296.0


@triton.jit
def _rows_kernel(
    x, wanted, good, part, M, C, stride_m, stride_c, steps, MASKED: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    used = tl.zeros((), dtype=tl.float64)
    broken = tl.zeros((), dtype=tl.float64)
    excluded = tl.zeros((), dtype=tl.float64)
    amax = tl.zeros((), dtype=tl.float32)
    square = tl.zeros((), dtype=tl.float64)
    for step in range(steps):
        rows = (pid * steps + step).to(tl.int64) * BM + tl.arange(0, BM)
        inside = rows < M
        take = inside
        if MASKED:
            take = inside & (tl.load(wanted + rows, mask=inside, other=0) != 0)
        bad = tl.zeros((BM,), dtype=tl.int32)
        top = tl.zeros((BM,), dtype=tl.float32)
        power = tl.zeros((BM,), dtype=tl.float64)
        for c0 in range(0, C, BC):
            cols = c0 + tl.arange(0, BC)
            at = x + rows[:, None] * stride_m + cols[None, :].to(tl.int64) * stride_c
            v = tl.load(at, mask=inside[:, None] & (cols < C)[None, :], other=0.0).to(tl.float32)
            size = tl.abs(v)
            finite = size < float("inf")
            bad += tl.sum((~finite).to(tl.int32), axis=1)
            size = tl.where(finite, size, 0.0)
            top = tl.maximum(top, tl.max(size, axis=1))
            power += tl.sum(size.to(tl.float64) * size.to(tl.float64), axis=1)
        ok = take & (bad == 0)
        tl.store(good + rows, ok.to(tl.int8), mask=inside)
        used += tl.sum(ok.to(tl.float64), axis=0)
        broken += tl.sum(tl.where(take, bad, 0).to(tl.float64), axis=0)
        excluded += tl.sum((inside & ~take).to(tl.float64), axis=0)
        amax = tl.maximum(amax, tl.max(tl.where(ok, top, 0.0), axis=0))
        square += tl.sum(tl.where(ok, power, 0.0), axis=0)
    tl.store(part + pid * 5, used)
    tl.store(part + pid * 5 + 1, broken)
    tl.store(part + pid * 5 + 2, excluded)
    tl.store(part + pid * 5 + 3, amax.to(tl.float64))
    tl.store(part + pid * 5 + 4, square)


@triton.jit
def _first_row(x, cols, inside, stride_c):
    """Shift of the sums: without it a mean far above the spread would eat the FP64 digits."""
    v = tl.load(x + cols.to(tl.int64) * stride_c, mask=inside, other=0.0).to(tl.float32)
    return tl.where(tl.abs(v) < float("inf"), v, 0.0).to(tl.float64)


@triton.jit
def _columns_kernel(
    x, good, sums, M, C, stride_m, stride_c, steps, ROWS: tl.constexpr, BM: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    live = cols < C
    shift = _first_row(x, cols, live, stride_c).to(tl.float32)
    total = tl.zeros((ROWS, BC), dtype=tl.float64)
    square = tl.zeros((ROWS, BC), dtype=tl.float64)
    zeros = tl.zeros((ROWS, BC), dtype=tl.int32)
    for step in range(steps):
        # A few rows in FP32, what they come to in FP64: casts of every value would take the most.
        some = tl.zeros((ROWS, BC), dtype=tl.float32)
        some_square = tl.zeros((ROWS, BC), dtype=tl.float32)
        for part in tl.static_range(BM // ROWS):
            rows = (split * steps + step).to(tl.int64) * BM + part * ROWS + tl.arange(0, ROWS)
            ok = tl.load(good + rows, mask=rows < M, other=0) != 0
            at = x + rows[:, None] * stride_m + cols[None, :].to(tl.int64) * stride_c
            inside = ok[:, None] & live[None, :]
            v = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            d = tl.where(inside, v - shift[None, :], 0.0)
            some += d
            some_square += d * d
            zeros += (inside & (v == 0)).to(tl.int32)
        total += some.to(tl.float64)
        square += some_square.to(tl.float64)
    at = sums + split * 3 * C + cols
    tl.store(at, tl.sum(total, axis=0), mask=live)
    tl.store(at + C, tl.sum(square, axis=0), mask=live)
    tl.store(at + 2 * C, tl.sum(zeros, axis=0).to(tl.float64), mask=live)


@triton.jit
def _total(part, programs, WHICH: tl.constexpr, BP: tl.constexpr):
    found = tl.zeros((), dtype=tl.float64)
    for p0 in range(0, programs, BP):
        at = p0 + tl.arange(0, BP)
        v = tl.load(part + at * 5 + WHICH, mask=at < programs, other=0.0)
        if WHICH == 3:
            found = tl.maximum(found, tl.max(v, axis=0))
        else:
            found += tl.sum(v, axis=0)
    return found


@triton.jit
def _merge_kernel(
    x, wanted, sums, part, rows, moments, scalars, ahead, M, C, stride_m, stride_c, splits,
    programs, count, MASKED: tl.constexpr, BEHIND: tl.constexpr, RESERVOIR: tl.constexpr,
    COUNT: tl.constexpr, EW: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    live = cols < C
    role = tl.program_id(1)
    # Names differ between the branches: Triton gives one name one type over both.
    if role == 0:
        n = _total(part, programs, 0, BP)
        total = tl.zeros((BC,), dtype=tl.float64)
        square = tl.zeros((BC,), dtype=tl.float64)
        zeros = tl.zeros((BC,), dtype=tl.float64)
        for s0 in range(0, splits, CHUNK):
            split = s0 + tl.arange(0, CHUNK)
            held = (split < splits)[:, None] & live[None, :]
            at = sums + split[:, None] * 3 * C + cols[None, :]
            total += tl.sum(tl.load(at, mask=held, other=0.0), axis=0)
            square += tl.sum(tl.load(at + C, mask=held, other=0.0), axis=0)
            zeros += tl.sum(tl.load(at + 2 * C, mask=held, other=0.0), axis=0)
        safe = tl.maximum(n, 1.0)
        shift = _first_row(x, cols, live, stride_c)
        off = total / safe
        mean = tl.where(n > 0, shift + off, 0.0)
        deviation = tl.maximum(square - total * off, 0.0)
        before = tl.load(scalars + 4)
        whole = tl.maximum(before + n, 1.0)
        old = tl.load(moments + cols, mask=live, other=0.0)
        delta = mean - old
        tl.store(moments + cols, old + delta * (n / whole), mask=live)
        spread = tl.load(moments + C + cols, mask=live, other=0.0)
        spread += deviation + delta * delta * (before * n / whole)
        tl.store(moments + C + cols, spread, mask=live)
        zeros += tl.load(moments + 2 * C + cols, mask=live, other=0.0)
        tl.store(moments + 2 * C + cols, zeros, mask=live)
        weight = tl.where(n > 0, tl.where(before == 0, 1.0, EW), 0.0).to(tl.float64)
        ew_mean = tl.load(moments + 3 * C + cols, mask=live, other=0.0)
        tl.store(moments + 3 * C + cols, ew_mean + (mean - ew_mean) * weight, mask=live)
        ew_square = tl.load(moments + 4 * C + cols, mask=live, other=0.0)
        ew_square += (deviation / safe + mean * mean - ew_square) * weight
        tl.store(moments + 4 * C + cols, ew_square, mask=live)
    else:
        order = tl.arange(0, COUNT)
        own = (role - 1).to(tl.int64)
        batch = tl.load(ahead).to(tl.int64)
        first = tl.load(ahead + 3).to(tl.int64)
        if BEHIND:
            # Those have counted this batch.
            batch -= 1
            first -= count
        position = first + order
        drawn = (_uniform(position + 0x51ED) * (position + 1).to(tl.float64)).to(tl.int64)
        slots = tl.where(position < RESERVOIR, position, drawn)
        slot = tl.sum(tl.where(order == own, slots, 0), axis=0)
        later = tl.sum(((order > own) & (order < count) & (slots == slot)).to(tl.int32), axis=0)
        offset = (_uniform(batch) * M).to(tl.int64)
        picked = (own * M // count + offset) % M
        v = tl.load(x + picked * stride_m + cols.to(tl.int64) * stride_c, mask=live, other=0.0)
        if MASKED:
            keep = tl.load(wanted + picked) != 0
            v = tl.where(keep, v.to(tl.float32), float("nan"))
        # Of two candidates for one slot the later wins.
        wins = (slot < RESERVOIR) & (later == 0)
        target = rows + slot * C + cols
        tl.store(target, v.to(rows.dtype.element_ty), mask=live & wins)


@triton.jit
def _counters_kernel(
    part, scalars, ahead, M, C, programs, count, BEHIND: tl.constexpr, HEAD: tl.constexpr,
    RING: tl.constexpr, EW: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    amax = _total(part, programs, 3, BP)
    batches = tl.load(scalars)
    slot = HEAD + batches.to(tl.int64) % RING
    used = _total(part, programs, 0, BP)
    square = _total(part, programs, 4, BP) / (tl.maximum(used, 1.0) * C)
    tl.store(scalars + slot, amax)
    tl.store(scalars + slot + RING, tl.sqrt(square))
    tl.store(scalars + 6, tl.maximum(tl.load(scalars + 6), amax))
    weighted = tl.load(scalars + 7)
    weight = tl.where(batches == 0, 1.0, EW).to(tl.float64)
    tl.store(scalars + 7, weighted + (amax - weighted) * weight)
    tl.store(scalars, batches + 1)
    tl.store(scalars + 1, tl.load(scalars + 1) + M)
    tl.store(scalars + 2, tl.load(scalars + 2) + _total(part, programs, 1, BP))
    if BEHIND:
        tl.store(scalars + 3, tl.load(ahead + 3))
    else:
        tl.store(scalars + 3, tl.load(scalars + 3) + count)
    tl.store(scalars + 4, tl.load(scalars + 4) + used)
    tl.store(scalars + 5, tl.load(scalars + 5) + _total(part, programs, 2, BP))


def observe(
    x: Tensor,
    wanted: Tensor | None,
    rows: Tensor,
    moments: Tensor,
    scalars: Tensor,
    *,
    candidates: int,
    weight: float,
    ahead: Tensor | None = None,
) -> None:
    """x (M, C), M > 0, any strides; wanted: bool (M,) or None. Updates the state in place.

    ahead: scalars of state that has recorded this batch already, and last of all: rows are drawn by
    its counters, and the count of candidates follows it.
    candidates: rows offered to the reservoir per batch, a power of two; weight: of the newest batch
    in the exponentially weighted statistics.
    """
    device, masked = x.device, wanted is not None
    signature = (
        x.shape, x.stride(), x.dtype, rows.shape, rows.dtype, scalars.shape, masked,
        ahead is not None, candidates, weight, device,
    )  # fmt: skip
    how = RECIPES.get(signature)
    if how is None:
        how = RECIPES[signature] = _Recipe(*signature)
    scratch = allocator(device)(*how.scratch)
    whole, part = x.data_ptr(), scratch.data_ptr()
    sums, good = part + 8 * how.sums, part + 8 * how.good
    mask = good if wanted is None else wanted.data_ptr()
    ahead = scalars if ahead is None else ahead
    state = [rows.data_ptr(), moments.data_ptr(), scalars.data_ptr(), ahead.data_ptr()]
    launches = (
        (how.rows, [whole, mask, good, part]),
        (how.columns, [whole, good, sums]),
        (how.merge, [whole, mask, sums, part, *state]),
        (how.counters, [part, *state[2:]]),
    )
    for call, pointers in launches:
        if not call.start(pointers):
            call.run(how.tensors(pointers, x, wanted, scratch, (rows, moments, scalars, ahead)))


_rows = Launcher(_rows_kernel)
_columns = Launcher(_columns_kernel)
_merge = Launcher(_merge_kernel)
_counters = Launcher(_counters_kernel)


class _Recipe:
    """All of the launches that follows from shapes, dtypes and switches."""

    def __init__(
        self, x_shape, x_strides, x_dtype, rows_shape, rows_dtype, scalars_shape, masked, behind,
        candidates, weight, device,
    ) -> None:  # fmt: skip
        (m, c), strides = x_shape, x_strides
        bm, bc = 32, 128
        across = -(-c // bc)
        # Long rows are read by few threads each, so that few rows keep the device busy too.
        tall, wide = (32, 128) if c <= 256 else (8, 512)
        blocks = -(-m // tall)
        programs = min(blocks, _ROW_PROGRAMS)
        row_steps = -(-blocks // programs)
        programs = -(-blocks // row_steps)
        blocks = -(-m // bm)
        splits = min(blocks, max(_COLUMN_PROGRAMS // across, 1))
        column_steps = -(-blocks // splits)
        splits = -(-blocks // column_steps)
        count = min(candidates, m)
        #: Places in the scratch, in numbers of 8 bytes: first the partial counts. All aligned.
        self.sums = _even(programs * 5)
        self.good = self.sums + _even(splits * 3 * c)
        self.scratch = dense((self.good + -(-m // 8),), torch.float64)

        def call(by: Launcher, grid: tuple[int, ...], sizes: Any, constants: Any) -> Call:
            key = (kind(*sizes), tuple(constants.values()), x_dtype, rows_dtype, device.index)
            return Call(by, grid, sizes, constants, key, device, num_warps=4)

        self.rows = call(
            _rows, (programs,), (m, c, *strides, row_steps),
            {"MASKED": masked, "BM": tall, "BC": wide},
        )  # fmt: skip
        self.columns = call(
            _columns, (across, splits), (m, c, *strides, column_steps),
            {"ROWS": 4, "BM": bm, "BC": bc},
        )  # fmt: skip
        self.merge = call(
            _merge, (across, 1 + count), (m, c, *strides, splits, programs, count),
            {
                "MASKED": masked, "BEHIND": behind, "RESERVOIR": rows_shape[0] - 1,
                "COUNT": candidates, "EW": weight, "BC": bc, "BP": 1024, "CHUNK": _CHUNK,
            },
        )  # fmt: skip
        ring = (scalars_shape[0] - _HEAD) // 2
        self.counters = call(
            _counters, (1,), (m, c, programs, count),
            {"BEHIND": behind, "HEAD": _HEAD, "RING": ring, "EW": weight, "BP": 1024},
        )  # fmt: skip

    def tensors(
        self,
        pointers: list[int],
        x: Tensor,
        wanted: Tensor | None,
        scratch: Tensor,
        state: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """What lies at these addresses."""
        good = scratch[self.good :].view(torch.int8)
        own = [scratch, scratch[self.sums :], good, x, *state]
        if wanted is not None:
            own.append(wanted.view(torch.int8))
        at = {t.data_ptr(): t for t in own}
        return tuple([at[pointer] for pointer in pointers])


def _even(numbers: int) -> int:
    return numbers + numbers % 2


RECIPES = Recipes()
