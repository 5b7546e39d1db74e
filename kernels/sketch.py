"""What a probed step records of a weight's gradient, in four launches and without a host sync.

    1 lengths   per row of x: its length; the maximum of x
    2 columns   per feature of gy: sum over rows of (gy * length)^2, in FP64; the maximum of gy
    3 finish    coherence of every row of gw; which columns of x the sketch takes; its marks
    4 copy      the chosen columns of all rows into the ring

The definitions are `probe.coherence.coherence` and `probe.sketch.record_ref`; the state is
described there. Launch 3 takes sums over `ENERGY_ROWS` rows that a reduction of torch has made, and
the norms of gw's rows.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka_compile.kernels.fp8 import magnitude
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import aligned
from loka_compile.kernels.launch import empty
from loka_compile.kernels.launch import kind
from loka_compile.kernels.observe import _uniform

#: Programs that columns are split over: enough to fill a device where features are few.
_COLUMN_PROGRAMS = 1024
#: Partial sums that are read at once.
_CHUNK = 16


@triton.jit
def _lengths_kernel(
    x, lengths, amax, M, K, stride_m, stride_k, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < M
    total = tl.zeros((BM,), dtype=tl.float64)
    top = tl.zeros((BM,), dtype=tl.int32)
    for k0 in range(0, K, BK):
        columns = k0 + tl.arange(0, BK)
        at = rows.to(tl.int64)[:, None] * stride_m + columns.to(tl.int64)[None, :] * stride_k
        v = tl.load(x + at, mask=inside[:, None] & (columns < K)[None, :], other=0.0)
        v = v.to(tl.float32)
        total += tl.sum(v.to(tl.float64) * v.to(tl.float64), axis=1)
        top = tl.maximum(top, tl.max(magnitude(v), axis=1))
    tl.store(lengths + rows, tl.sqrt(total), mask=inside)
    # As bits, which order like the values: NaN is above all.
    tl.atomic_max(amax, tl.max(top, axis=0), sem="relaxed")


@triton.jit
def _columns_kernel(
    gy, lengths, sums, amax, M, N, stride_m, stride_n, steps, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    live = columns < N
    split = tl.program_id(1)
    total = tl.zeros((BN,), dtype=tl.float64)
    top = tl.zeros((BN,), dtype=tl.int32)
    for step in range(steps):
        rows = (split * steps + step).to(tl.int64) * BM + tl.arange(0, BM)
        inside = rows < M
        at = rows[:, None] * stride_m + columns.to(tl.int64)[None, :] * stride_n
        v = tl.load(gy + at, mask=inside[:, None] & live[None, :], other=0.0).to(tl.float32)
        long = tl.load(lengths + rows, mask=inside, other=0.0)
        part = v.to(tl.float64) * long[:, None]
        total += tl.sum(part * part, axis=0)
        top = tl.maximum(top, tl.max(magnitude(v), axis=0))
    tl.store(sums + split * N + columns, total, mask=live)
    tl.atomic_max(amax + 1, tl.max(top, axis=0), sem="relaxed")


@triton.jit
def _energy(energy, at, mask):
    e = tl.load(energy + at, mask=mask, other=0.0)
    return tl.where(e < float("inf"), e, 0.0)


@triton.jit
def _finish_kernel(
    sums, signal, scalars, coherence, energy, columns, marks, amax, N, K, splits, length,
    SLOTS: tl.constexpr, WIDTH: tl.constexpr, FIRST_WEIGHT: tl.constexpr, ROWS: tl.constexpr,
    X: tl.constexpr, EVEN: tl.constexpr, COHERENCES: tl.constexpr, BS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    number = tl.maximum(tl.load(scalars).to(tl.int64) - 1, 0)
    role = tl.program_id(0)
    if role > 0:
        at = (role - 1) * BN + tl.arange(0, BN)
        live = at < N
        spread = tl.zeros((BN,), dtype=tl.float64)
        for s0 in range(0, splits, CHUNK):
            split = s0 + tl.arange(0, CHUNK)
            part = sums + split[:, None] * N + at[None, :]
            held_part = (split < splits)[:, None] & live[None, :]
            spread += tl.sum(tl.load(part, mask=held_part, other=0.0), axis=0)
        own = tl.load(signal + at, mask=live, other=0.0)
        found = tl.where(own == 0, 0.0, own / tl.sqrt(spread))
        to = coherence + (number % COHERENCES) * N + at
        tl.store(to, found.to(tl.float32), mask=live)
    else:
        start = _uniform(number)
        whole = tl.zeros((), dtype=tl.float64)
        for k0 in range(0, K, BK):
            at = k0 + tl.arange(0, BK)
            whole += tl.sum(_energy(energy, at, at < K), axis=0)
        order = tl.arange(0, X)
        size = tl.zeros((), dtype=tl.float64) + K
        # An input that is zero on those rows: all chances are equal.
        share = tl.where(whole > 0, (1.0 - EVEN) / whole, 0.0)
        floor = tl.where(whole > 0, EVEN / size, 1.0 / size)
        targets = (order + start) / X
        before = tl.zeros((), dtype=tl.float64)
        picked = tl.zeros((X,), dtype=tl.int32)
        for k0 in range(0, K, BK):
            at = k0 + tl.arange(0, BK)
            inside = at < K
            chance = _energy(energy, at, inside) * share + floor
            chance = tl.where(inside, chance, 0.0)
            reached = before + tl.cumsum(chance, axis=0)
            passed = (reached[None, :] <= targets[:, None]) & inside[None, :]
            picked += tl.sum(passed.to(tl.int32), axis=1)
            before += tl.sum(chance, axis=0)
        picked = tl.minimum(picked, K - 1)
        tl.store(columns + order, picked)
        weight = 1.0 / (X * (_energy(energy, picked, order < X) * share + floor))
        last = marks + SLOTS * WIDTH
        here = tl.load(last)
        count = tl.load(last + 1)
        first = tl.where(here + length > ROWS, 0.0, here)
        # What the new rows overwrite is gone.
        slots = tl.arange(0, BS)
        held = slots < SLOTS
        begin = tl.load(marks + slots * WIDTH, mask=held, other=0.0)
        long = tl.load(marks + slots * WIDTH + 1, mask=held, other=0.0)
        slot = count.to(tl.int64) % SLOTS
        hit = (begin < first + length) & (begin + long > first) & held & (slots != slot)
        tl.store(marks + slots * WIDTH + 1, tl.zeros((BS,), dtype=tl.float64), mask=hit)
        row = marks + slot * WIDTH
        tl.store(row, first)
        # A plain number where Triton knows that it is 1.
        tl.store(row + 1, first + length - first)
        tl.store(row + 2, tl.load(amax).to(tl.float32, bitcast=True).to(tl.float64))
        tl.store(row + 3, tl.load(amax + 1).to(tl.float32, bitcast=True).to(tl.float64))
        tl.store(row + FIRST_WEIGHT + order, weight)
        tl.store(last, first + length)
        tl.store(last + 1, count + 1)


@triton.jit
def _copy_kernel(
    gy, x, columns, scalars, marks, sketch, length, N, gy_m, gy_n, x_m, x_k,
    SLOTS: tl.constexpr, WIDTH: tl.constexpr, GY: tl.constexpr, X: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    number = tl.maximum(tl.load(scalars).to(tl.int64) - 1, 0)
    start = _uniform(number)
    count = tl.load(marks + SLOTS * WIDTH + 1).to(tl.int64) - 1
    first = tl.load(marks + (count % SLOTS) * WIDTH).to(tl.int64)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    mask = (rows < length)[:, None]
    order_g = tl.arange(0, GY)
    of_gy = tl.minimum(((order_g + start) * N / GY).to(tl.int64), N - 1)
    far = rows.to(tl.int64)[:, None]
    v = tl.load(gy + far * gy_m + of_gy[None, :] * gy_n, mask=mask, other=0.0)
    to = sketch + (first + far) * (GY + X)
    tl.store(to + order_g[None, :], v.to(sketch.dtype.element_ty), mask=mask)
    order_x = tl.arange(0, X)
    of_x = tl.load(columns + order_x).to(tl.int64)
    u = tl.load(x + far * x_m + of_x[None, :] * x_k, mask=mask, other=0.0)
    tl.store(to + GY + order_x[None, :], u.to(sketch.dtype.element_ty), mask=mask)


_lengths = Launcher(_lengths_kernel)
_columns = Launcher(_columns_kernel)
_finish = Launcher(_finish_kernel)
_copy = Launcher(_copy_kernel)


def sketch(
    gw: Tensor,
    gy: Tensor,
    x: Tensor,
    scalars: Tensor,
    coherence: Tensor,
    ring: Tensor,
    marks: Tensor,
    *,
    columns_gy: int,
    columns_x: int,
    first_weight: int,
    energy_rows: int,
    even: float,
) -> None:
    """gw (N, K), gy (M, N), x (M, K), M > 0, any strides. Updates the last three in place.

    The sizes are those of `probe.sketch`: columns kept of each, the place of their weights in a
    row of marks, rows on which energies are taken, the share of a column's chance without them.
    """
    (m, n), k, device = gy.shape, x.shape[1], x.device
    lengths = empty((m,), torch.float64, device)
    amax = torch.zeros(2, dtype=torch.int32, device=device)
    bm, bk, bn = (16, 256, 128) if k <= 256 else (8, 512, 128)
    key: Hashable = (kind(m, k, *x.stride()), bm, x.dtype, aligned(x), device.index)
    grid: tuple[int, ...] = (triton.cdiv(m, bm),)
    args: tuple[Any, ...] = (x, lengths, amax, m, k, *x.stride())
    _lengths(key, grid, args, {"BM": bm, "BK": bk}, device, num_warps=4)
    blocks = triton.cdiv(m, 32)
    steps = triton.cdiv(blocks, max(_COLUMN_PROGRAMS // triton.cdiv(n, bn), 1))
    splits = triton.cdiv(blocks, steps)
    sums = empty((splits, n), torch.float64, device)
    key = (kind(m, n, *gy.stride(), steps), gy.dtype, aligned(gy, sums), device.index)
    grid = (triton.cdiv(n, bn), splits)
    args = (gy, lengths, sums, amax, m, n, *gy.stride(), steps)
    _columns(key, grid, args, {"BM": 32, "BN": bn}, device, num_warps=4)
    signal = torch.linalg.vector_norm(gw, dim=1, dtype=torch.float64)
    some = torch.linalg.vector_norm(x[:: -(-m // energy_rows)], dim=0, dtype=torch.float64)
    energy = some.square_()
    picked = empty((columns_x,), torch.int32, device)
    slots, width = marks.shape[0] - 1, marks.shape[1]
    length = min(m, ring.shape[0])
    constants = {
        "SLOTS": slots, "WIDTH": width, "FIRST_WEIGHT": first_weight, "ROWS": ring.shape[0],
        "X": columns_x, "EVEN": even, "COHERENCES": coherence.shape[0],
        "BS": triton.next_power_of_2(slots), "BN": bn, "BK": 1024,
        "CHUNK": _CHUNK,
    }  # fmt: skip
    # The ring's length and the batches of coherences (fewer of wide gradients) are compiled in.
    key = (kind(n, k, splits, length), tuple(constants.values()), device.index)
    grid = (1 + triton.cdiv(n, bn),)
    args = (
        sums, signal, scalars, coherence, energy, picked, marks, amax, n, k, splits, length,
    )  # fmt: skip
    _finish(key, grid, args, constants, device, num_warps=4)
    constants = {"SLOTS": slots, "WIDTH": width, "GY": columns_gy, "X": columns_x, "BM": 64}
    key = (
        kind(length, n, *gy.stride(), *x.stride()), gy.dtype, x.dtype, ring.dtype, aligned(gy),
        aligned(x), device.index,
    )  # fmt: skip
    grid = (triton.cdiv(length, 64),)
    args = (gy, x, picked, scalars, marks, ring, length, n, *gy.stride(), *x.stride())
    _copy(key, grid, args, constants, device, num_warps=4)
