"""Triton code of `fused_backward`: maxima of the gradient, then the gradient as FP8 both ways."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents
from triton.language.extra.cuda import gdc_wait

from loka_compile.kernels.fp8 import apart
from loka_compile.kernels.fp8 import magnitude
from loka_compile.kernels.fp8 import power_of_two
from loka_compile.kernels.gradient_tile import gradient_tile


@triton.jit
def backward_amax_kernel(
    gy_ptr, u_ptr, r_ptr, gain_ptr, row_ptr, column_ptr, partial_ptr, M, N, block, blocks, lanes,
    BM: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr,
    GAIN: tl.constexpr, ROWS: tl.constexpr, ROWS_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A maximum of the whole is left as one per program: nothing to clear beforehand."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile_n = tl.program_id(0)
    lane = tl.program_id(1)
    first = tile_n * block
    local = tl.arange(0, BN)
    columns = first + local
    inside = (local < block) & (columns < N)
    width = tl.minimum(block, N - first).to(tl.float32)
    top = tl.zeros((BM, BN), dtype=tl.int32)
    total = tl.zeros((BN,), dtype=tl.float32)
    for tile_m in range(lane, tl.cdiv(M, BM), tl.num_programs(1)):
        rows = tile_m * BM + tl.arange(0, BM)
        mask = (rows < M)[:, None] & inside[None, :]
        gz, for_gain = gradient_tile(
            gy_ptr, u_ptr, r_ptr, gain_ptr, rows, columns, mask, tile_n, M, N, blocks, width, ACT,
            GATE, GAIN, "",
        )  # fmt: skip
        if GAIN:
            total += tl.sum(for_gain, axis=0)
        bits = magnitude(gz)
        if ROWS:
            tl.atomic_max(row_ptr + rows, tl.max(bits, axis=1), mask=rows < M, sem="relaxed")
        top = tl.maximum(top, bits)
    if GAIN:
        # Partial sums, added up outside: atomics would make the result depend on timing.
        at = partial_ptr + columns
        tl.store(at + lane * N, total, mask=inside)
        for other in range(lane + tl.num_programs(1), lanes, tl.num_programs(1)):
            tl.store(at + other * N, tl.zeros_like(total), mask=inside)
    if ROWS_T:
        tl.atomic_max(column_ptr + columns, tl.max(top, axis=0), mask=inside, sem="relaxed")
    if not ROWS or not ROWS_T:
        whole = tl.max(tl.max(top, axis=1), axis=0)
        whole_ptr = column_ptr if ROWS else row_ptr
        tl.store(whole_ptr + lane * blocks + tile_n, whole)


@triton.jit
def backward_quantize_kernel(
    gy_ptr, u_ptr, r_ptr, gain_ptr, row_ptr, column_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr,
    cells_ptr, M, M_UP, N, block, blocks, parts, zero,
    BM: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr,
    GAIN: tl.constexpr, ROWS: tl.constexpr, ROWS_T: tl.constexpr, PDL: tl.constexpr,
    MAX: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, MAX_T: tl.constexpr,
    EXPONENT_T: tl.constexpr, MANTISSA_T: tl.constexpr, PARTS: tl.constexpr,
    RECORD: tl.constexpr,
):  # fmt: skip
    """PARTS: the maxima of the whole, `parts`, up to a power of two. zero: 0, see `fp8.apart`.
    RECORD: keep the maximum of the whole."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile_n = tl.program_id(0)
    # Last rows first: what the first kernel read last still lies in L2.
    tile_m = tl.num_programs(1) - 1 - tl.program_id(1)
    first = tile_n * block
    local = tl.arange(0, BN)
    columns = first + local
    inside = (local < block) & (columns < N)
    rows = tile_m * BM + tl.arange(0, BM)
    row_ok = rows < M
    mask = row_ok[:, None] & inside[None, :]
    width = tl.minimum(block, N - first).to(tl.float32)
    gz, _ = gradient_tile(
        gy_ptr, u_ptr, r_ptr, gain_ptr, rows, columns, mask, tile_n, M, N, blocks, width, ACT,
        GATE, GAIN, "evict_first",
    )  # fmt: skip
    is_first_n = tile_n == 0
    is_first_m = tile_m == 0
    if not ROWS or not ROWS_T:
        part = tl.arange(0, PARTS)
        whole_ptr = column_ptr if ROWS else row_ptr
        whole = tl.max(tl.load(whole_ptr + part, mask=part < parts, other=0), axis=0)
        if RECORD:
            one = is_first_n & is_first_m
            tl.store(cells_ptr, whole, mask=one)
            # As bits, which order like the values: NaN is above all.
            tl.store(cells_ptr + 1, tl.maximum(tl.load(cells_ptr + 1), whole), mask=one)
    if ROWS:
        scale, inverse = power_of_two(
            tl.load(row_ptr + rows, mask=row_ok, other=0), EXPONENT, MANTISSA
        )
        tl.store(scale_ptr + rows, scale, mask=row_ok & is_first_n)
        q = gz * inverse[:, None]
    else:
        scale, inverse = power_of_two(whole, EXPONENT, MANTISSA)
        tl.store(scale_ptr, scale, mask=is_first_n & is_first_m)
        q = gz * inverse
    # NaN passes the clamp: a non-finite row must stay visible.
    q = tl.clamp(q, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL).to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :], q, mask=mask)
    # Transposed before it is rounded: see `fp8.apart`.
    turned = tl.trans(gz)
    if ROWS_T:
        scale_t, inverse_t = power_of_two(
            tl.load(column_ptr + columns, mask=inside, other=0), EXPONENT_T, MANTISSA_T
        )
        tl.store(scale_t_ptr + columns, scale_t, mask=inside & is_first_m)
        t = turned * inverse_t[:, None]
    else:
        scale_t, inverse_t = power_of_two(apart(whole, zero), EXPONENT_T, MANTISSA_T)
        tl.store(scale_t_ptr, scale_t, mask=is_first_n & is_first_m)
        t = turned * inverse_t
    t = tl.clamp(t, -MAX_T, MAX_T, propagate_nan=tl.PropagateNan.ALL)
    at = columns.to(tl.int64)[:, None] * M_UP + rows[None, :]
    # Rows past M are zeros: they fill the tail up to M_UP.
    tail = inside[:, None] & (rows < M_UP)[None, :]
    tl.store(qt_ptr + at, t.to(qt_ptr.dtype.element_ty), mask=tail)
