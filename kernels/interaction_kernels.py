"""The Triton code of `interaction`: a sample's x is read once each way."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(ptr, rows, columns, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(rows, columns) of a matrix, zero outside ROWS x COLUMNS."""
    at = rows[:, None] * row_stride + columns[None, :] * column_stride
    return tl.load(ptr + at, mask=(rows < ROWS)[:, None] & (columns < COLUMNS)[None, :], other=0.0)


@triton.jit
def _put(ptr, tile, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    at = rows[:, None] * COLUMNS + columns[None, :]
    tl.store(ptr + at, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _forward_kernel(
    x_ptr, p_ptr, l_ptr, fm_ptr, c_ptr, B, p_row, p_column, l_row, l_column,
    N: tl.constexpr, D: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
    NN: tl.constexpr, DD: tl.constexpr, KK: tl.constexpr, MM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, NN)
    d = tl.arange(0, DD)
    k = tl.arange(0, KK)
    m = tl.arange(0, MM)
    p = _tile(p_ptr, n, k, p_row, p_column, N, K)
    if M > 0:
        left = _tile(l_ptr, m, n, l_row, l_column, M, N)
    for b in tl.range(tl.program_id(0), B, tl.num_programs(0), num_stages=STAGES):
        sample = b + tl.full((), 0, tl.int64)  # 64-bit offsets
        x = _tile(x_ptr + sample * (N * D), n, d, D, 1, N, D)
        t = tl.dot(tl.trans(x), p).to(x.dtype)
        _put(fm_ptr + sample * (N * K), tl.dot(x, t), n, k, N, K)
        if M > 0:
            _put(c_ptr + sample * (M * D), tl.dot(left, x), m, d, M, D)


@triton.jit
def _backward_kernel(
    x_ptr, p_ptr, l_ptr, gfm_ptr, gc_ptr, gx_ptr, gp_ptr, gl_ptr, B, gc_sample, p_row, p_column,
    l_row, l_column,
    N: tl.constexpr, D: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
    NN: tl.constexpr, DD: tl.constexpr, KK: tl.constexpr, MM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, NN)
    d = tl.arange(0, DD)
    k = tl.arange(0, KK)
    m = tl.arange(0, MM)
    p = _tile(p_ptr, n, k, p_row, p_column, N, K)
    gp = tl.zeros((NN, KK), dtype=tl.float32)
    if M > 0:
        turned = _tile(l_ptr, n, m, l_column, l_row, N, M)
        gl = tl.zeros((MM, NN), dtype=tl.float32)
    for b in tl.range(tl.program_id(0), B, tl.num_programs(0), num_stages=STAGES):
        sample = b + tl.full((), 0, tl.int64)  # 64-bit offsets
        x = _tile(x_ptr + sample * (N * D), n, d, D, 1, N, D)
        gfm = _tile(gfm_ptr + sample * (N * K), n, k, K, 1, N, K)
        t = tl.dot(tl.trans(x), p).to(x.dtype)
        gt = tl.dot(tl.trans(x), gfm).to(x.dtype)
        gx = tl.dot(gfm, tl.trans(t))
        gx = tl.dot(p, tl.trans(gt), gx)
        gp = tl.dot(x, gt, gp)
        if M > 0:
            gc = _tile(gc_ptr + sample * gc_sample, m, d, D, 1, M, D)
            gx = tl.dot(turned, gc, gx)
            gl = tl.dot(gc, tl.trans(x), gl)
        _put(gx_ptr + sample * (N * D), gx, n, d, N, D)
    program = tl.program_id(0).to(tl.int64)
    _put(gp_ptr + program * (N * K), gp, n, k, N, K)
    if M > 0:
        _put(gl_ptr + program * (M * N), gl, m, n, M, N)


@triton.jit
def _add_up(part_ptr, out_ptr, at, count, SIZE: tl.constexpr, TALL: tl.constexpr):
    """Partial sums (count, SIZE), FP32 -> out (SIZE,), at places `at`."""
    lines = tl.arange(0, TALL)
    total = tl.zeros((TALL, at.shape[0]), dtype=tl.float32)
    for first in tl.range(0, count, TALL):
        line = first + lines
        mask = (line < count)[:, None] & (at < SIZE)[None, :]
        where = line.to(tl.int64)[:, None] * SIZE + at[None, :]
        total += tl.load(part_ptr + where, mask=mask, other=0.0)
    result = tl.sum(total, axis=0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, result, mask=at < SIZE)


@triton.jit
def _sums_kernel(
    part_p_ptr, part_l_ptr, gp_ptr, gl_ptr, count,
    P: tl.constexpr, L: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The first programs add up gp, which has P values, the others gl, which has L."""
    of_p: tl.constexpr = (P + WIDE - 1) // WIDE
    program = tl.program_id(0)
    if program < of_p:
        _add_up(part_p_ptr, gp_ptr, program * WIDE + tl.arange(0, WIDE), count, P, TALL)
    elif L > 0:
        at = (program - of_p) * WIDE + tl.arange(0, WIDE)
        _add_up(part_l_ptr, gl_ptr, at, count, L, TALL)
