"""Triton code of `fused_backward`: maxima of the gradient, then the gradient as FP8 both ways."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents
from triton.language.extra.cuda import gdc_wait

from loka_compile.kernels.fp8 import magnitude
from loka_compile.kernels.fp8 import power_of_two
from loka_compile.kernels.fp8 import to_fp8
from loka_compile.kernels.gradient_tile import gradient_of
from loka_compile.kernels.gradient_tile import gradient_tile
from loka_compile.kernels.turned_words import kept
from loka_compile.kernels.turned_words import put_words
from loka_compile.kernels.turned_words import read
from loka_compile.kernels.turned_words import word_of


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
    cells_ptr, M, M_UP, N, block, blocks, parts,
    LINES: tl.constexpr, BN: tl.constexpr, WHOLE: tl.constexpr, ACT: tl.constexpr,
    GATE: tl.constexpr, GAIN: tl.constexpr, ROWS: tl.constexpr, ROWS_T: tl.constexpr,
    PDL: tl.constexpr, EXACT: tl.constexpr, MAX: tl.constexpr, EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr, LIKE_T: tl.constexpr, MAX_T: tl.constexpr, EXPONENT_T: tl.constexpr,
    MANTISSA_T: tl.constexpr, PARTS: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """A tile of LINES * 16 rows and one block, in steps of every 16th row; qt_ptr: int32, see
    `turned_words`. WHOLE: M is a multiple of the tile, all blocks BN wide. PARTS: the maxima of the
    whole, `parts`, up to a power of two. RECORD: keep the maximum of the whole."""
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
    width = tl.minimum(block, N - first).to(tl.float32)
    is_first_n = tile_n == 0
    is_first_m = tile_m == 0
    gain = tl.zeros((BN,), dtype=tl.float32)
    if GAIN:
        gain = tl.load(gain_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    start = tile_m * (LINES * 16) + tl.arange(0, LINES) * 16
    # 64-bit offsets: M * N passes 2**31 for real batches.
    at = start.to(tl.int64)[:, None] * N + columns[None, :]
    gy_ptr += at
    u_ptr += at
    q_ptr += at
    r_ptr += start.to(tl.int64) * blocks + tile_n
    gy, u, r = read(gy_ptr, u_ptr, r_ptr, start, inside, M, True, WHOLE, "evict_first")
    if not ROWS or not ROWS_T:
        place = tl.arange(0, PARTS)
        whole_ptr = column_ptr if ROWS else row_ptr
        whole = tl.max(tl.load(whole_ptr + place, mask=place < parts, other=0), axis=0)
        if RECORD:
            one = is_first_n & is_first_m
            tl.store(cells_ptr, whole, mask=one)
            # As bits, which order like the values: NaN is above all.
            tl.store(cells_ptr + 1, tl.maximum(tl.load(cells_ptr + 1), whole), mask=one)
    if not ROWS:
        scale, inverse = power_of_two(whole, EXPONENT, MANTISSA)
        tl.store(scale_ptr, scale, mask=is_first_n & is_first_m)
    if ROWS_T:
        scale_t, inverse_t = power_of_two(
            tl.load(column_ptr + columns, mask=inside, other=0), EXPONENT_T, MANTISSA_T
        )
        tl.store(scale_t_ptr + columns, scale_t, mask=inside & is_first_m)
        by = inverse_t[None, :]
    else:
        scale_t, by = power_of_two(whole, EXPONENT_T, MANTISSA_T)
        tl.store(scale_t_ptr, scale_t, mask=is_first_n & is_first_m)
    empty = tl.zeros((LINES, BN), dtype=tl.int32)
    # Words of four rows each, the oldest first.
    a, b, c, d = empty, empty, empty, empty
    for step in range(0, 16, 4):
        held = ()
        for part in tl.static_range(4):
            rows = start + step + part
            here_gy, here_u, here_r = gy.to(tl.float32), u.to(tl.float32), r
            # The next rows are on their way meanwhile.
            gy_ptr += N
            u_ptr += N
            r_ptr += blocks
            gy, u, r = read(
                gy_ptr, u_ptr, r_ptr, rows + 1, inside, M, step + part < 15, WHOLE, "evict_first"
            )  # fmt: skip
            gz, _ = gradient_of(here_gy, here_u, here_r, gain, width, ACT, GATE, GAIN)
            if ROWS:
                scale, inverse_r = power_of_two(
                    tl.load(row_ptr + rows, mask=rows < M, other=0), EXPONENT, MANTISSA
                )
                tl.store(scale_ptr + rows, scale, mask=(rows < M) & is_first_n)
                v = gz * inverse_r[:, None]
            else:
                v = gz * inverse
            q = to_fp8(v, q_ptr.dtype.element_ty, MAX, EXACT)
            if WHOLE:
                tl.store(q_ptr, q)
            else:
                tl.store(q_ptr, q, mask=(rows < M)[:, None] & inside[None, :])
            q_ptr += N
            held = held + (gz * by,)  # type: ignore[assignment]  # noqa: RUF005
        e, f, g, h = held  # type: ignore[misc]
        word = word_of(e, f, g, h, LIKE_T, MAX_T, EXACT)
        if not WHOLE:
            # Rows past M are zeros, beside a NaN scale too: they fill the tail up to M_UP.
            word = kept(word, M - start - step)
        a, b, c, d = b, c, d, word
    to = qt_ptr + (columns.to(tl.int64)[None, :] * M_UP + start[:, None]) // 4
    put_words(to, a, b, c, d, (start < M_UP)[:, None] & inside[None, :], EXACT)
