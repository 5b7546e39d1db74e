"""Triton code of `sketch`."""

from __future__ import annotations

import triton
import triton.language as tl

from loka_compile.kernels.fp8 import magnitude
from loka_compile.kernels.observe import _uniform


@triton.jit
def _lengths(x, lengths, first, M, K, stride_m, stride_k, BM: tl.constexpr, BK: tl.constexpr):
    """Lengths of BM rows of x; -> their maximum as bits, which order like the values: NaN is above
    all."""
    rows = first * BM + tl.arange(0, BM)
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
    return tl.max(top, axis=0)


@triton.jit
def _sizes_kernel(
    x, gw, lengths, signal, energy, tops, M, N, K, some, x_m, x_k, gw_n, gw_k, some_m, of_x, of_gw,
    BM: tl.constexpr, BK: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Of x and of gw by rows, then of x by columns, on `some` of its rows: programs in a row."""
    which = tl.program_id(0)
    if which < of_x:
        top = _lengths(x, lengths, which, M, K, x_m, x_k, BM, BK)
        tl.store(tops + which, top)
    elif which < of_x + of_gw:
        _lengths(gw, signal, which - of_x, N, K, gw_n, gw_k, BM, BK)
    else:
        columns = (which - of_x - of_gw) * SIDE + tl.arange(0, SIDE)
        live = columns < K
        total = tl.zeros((SIDE, SIDE), dtype=tl.float64)
        for m0 in range(0, some, SIDE):
            rows = m0 + tl.arange(0, SIDE).to(tl.int64)
            at = rows[:, None] * some_m + columns.to(tl.int64)[None, :] * x_k
            v = tl.load(x + at, mask=(rows < some)[:, None] & live[None, :], other=0.0)
            v = v.to(tl.float32).to(tl.float64)
            total += v * v
        tl.store(energy + columns, tl.sum(total, axis=0), mask=live)


@triton.jit
def _columns_kernel(
    gy, lengths, sums, tops, M, N, stride_m, stride_n, steps, ROWS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    live = columns < N
    split = tl.program_id(1)
    total = tl.zeros((ROWS, BN), dtype=tl.float64)
    top = tl.zeros((ROWS, BN), dtype=tl.int32)
    for step in range(steps):
        for part in tl.static_range(BM // ROWS):
            rows = (split * steps + step).to(tl.int64) * BM + part * ROWS + tl.arange(0, ROWS)
            inside = rows < M
            at = rows[:, None] * stride_m + columns.to(tl.int64)[None, :] * stride_n
            v = tl.load(gy + at, mask=inside[:, None] & live[None, :], other=0.0).to(tl.float32)
            long = tl.load(lengths + rows, mask=inside, other=0.0)
            product = v.to(tl.float64) * long[:, None]
            total += product * product
            top = tl.maximum(top, magnitude(v))
    tl.store(sums + split * N + columns, tl.sum(total, axis=0), mask=live)
    to = tops + split * tl.num_programs(0) + tl.program_id(0)
    tl.store(to, tl.max(tl.max(top, axis=1), axis=0))


@triton.jit
def _energy(energy, at, mask):
    e = tl.load(energy + at, mask=mask, other=0.0)
    return tl.where(e < float("inf"), e, 0.0)


@triton.jit
def _largest(tops, count, BK: tl.constexpr):
    """FP64, of magnitudes as bits."""
    top = tl.zeros((BK,), dtype=tl.int32)
    for first in range(0, count, BK):
        at = first + tl.arange(0, BK)
        top = tl.maximum(top, tl.load(tops + at, mask=at < count, other=0))
    return tl.max(top, axis=0).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _finish_kernel(
    sums, signal, scalars, coherence, energy, columns, marks, tops_x, tops_gy, N, K, splits, length,
    of_x, of_gy,
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
        tl.store(row + 2, _largest(tops_x, of_x, BK))
        tl.store(row + 3, _largest(tops_gy, of_gy, BK))
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
