"""Triton code of `fused_backward`: maxima of the gradient, then the gradient as FP8 both ways."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents
from triton.language.extra.cuda import gdc_wait

from loka_compile.kernels.fp8 import larger_magnitude
from loka_compile.kernels.fp8 import magnitude
from loka_compile.kernels.fp8 import power_of_two
from loka_compile.kernels.fp8 import to_fp8
from loka_compile.kernels.gradient_tile import gradient_of
from loka_compile.kernels.gradient_tile import gradient_tile
from loka_compile.kernels.gradient_tile import read_rows
from loka_compile.kernels.words import first_bytes
from loka_compile.kernels.words import pair_of
from loka_compile.kernels.words import word_of


@triton.jit
def backward_amax_kernel(
    gy_ptr, u_ptr, r_ptr, gain_ptr, row_ptr, column_ptr, partial_ptr, M, N, block, blocks, lanes,
    BM: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr,
    GAIN: tl.constexpr, ROWS: tl.constexpr, ROWS_T: tl.constexpr, PDL: tl.constexpr,
    WHOLE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A maximum of the whole is left as one per program: nothing to clear beforehand. WHOLE: M is a
    multiple of BM, all blocks BN wide."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile_n = tl.program_id(0)
    lane = tl.program_id(1)
    first = tile_n * block
    local = tl.arange(0, BN)
    columns = first + local
    inside = (local < block) & (columns < N)
    width = BN if WHOLE else tl.minimum(block, N - first).to(tl.float32)
    top = tl.zeros((BM, BN), dtype=tl.int32)
    total = tl.zeros((BN,), dtype=tl.float32)
    for tile_m in range(lane, tl.cdiv(M, BM), tl.num_programs(1)):
        rows = tile_m * BM + tl.arange(0, BM)
        mask = (rows < M)[:, None] & inside[None, :]
        gz, for_gain = gradient_tile(
            gy_ptr, u_ptr, r_ptr, gain_ptr, rows, columns, mask, tile_n, M, N, blocks, width, ACT,
            GATE, GAIN, WHOLE, EXACT,
        )  # fmt: skip
        if GAIN:
            total += tl.sum(for_gain, axis=0)
        if ROWS:
            most = tl.max(magnitude(gz), axis=1)
            tl.atomic_max(row_ptr + rows, most, mask=rows < M, sem="relaxed")
        top = larger_magnitude(top, gz, EXACT)
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
    """A tile of 16 * LINES rows and one block, in 16 steps of every 16th row: a thread then has 16
    rows of a column side by side, which lie so in qt. qt_ptr: int64, eight rows of M each. WHOLE: M
    is a multiple of the tile's rows, all blocks BN wide. PARTS: the maxima of the whole, `parts`,
    up to a power of two. RECORD: keep the maximum of the whole."""
    SAME: tl.constexpr = (
        not ROWS and not ROWS_T and EXPONENT == EXPONENT_T and MANTISSA == MANTISSA_T
    )
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile_n = tl.program_id(0) % blocks
    # Last rows first: what the first kernel read last still lies in L2.
    tile_m = tl.num_programs(0) // blocks - 1 - tl.program_id(0) // blocks
    first = tile_n * block
    local = tl.arange(0, BN)
    columns = first + local
    inside = (local < block) & (columns < N)
    width = BN if WHOLE else tl.minimum(block, N - first).to(tl.float32)
    is_first_n = tile_n == 0
    is_first_m = tile_m == 0
    gain = tl.zeros((1, BN), dtype=tl.float32)
    if GAIN:
        gain = tl.load(gain_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    start = tile_m * (16 * LINES) + tl.arange(0, LINES) * 16
    # 64-bit offsets: M * N passes 2**31 for real batches.
    at = start.to(tl.int64)[:, None] * N + columns[None, :]
    gy_ptr += at
    u_ptr += at
    q_ptr += at
    r_ptr += start.to(tl.int64) * blocks + tile_n
    gy, u, r = read_rows(gy_ptr, u_ptr, r_ptr, start, inside, M, True, WHOLE)
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
        by_column = inverse_t[None, :]
    else:
        scale_t, by_column = power_of_two(whole, EXPONENT_T, MANTISSA_T)
        tl.store(scale_t_ptr, scale_t, mask=is_first_n & is_first_m)
    # Distinct: Triton does not carry variables of a loop that begin as one value.
    a = tl.full((LINES, BN), 0, tl.int32)
    b = tl.full((LINES, BN), 1, tl.int32)
    c = tl.full((LINES, BN), 2, tl.int32)
    d = tl.full((LINES, BN), 3, tl.int32)
    for step in range(0, 16, 4):
        held = ()
        for part in tl.static_range(4):
            rows = start + step + part
            here_gy, here_u, here_r = gy, u, r[:, None]
            # The next rows are on their way meanwhile.
            gy_ptr += N
            u_ptr += N
            r_ptr += blocks
            gy, u, r = read_rows(gy_ptr, u_ptr, r_ptr, rows + 1, inside, M, step + part < 15, WHOLE)
            gz, _ = gradient_of(here_gy, here_u, here_r, gain, width, ACT, GATE, GAIN, EXACT)
            if ROWS:
                row_ok = rows < M
                scale, by_row = power_of_two(
                    tl.load(row_ptr + rows, mask=row_ok, other=0), EXPONENT, MANTISSA
                )
                tl.store(scale_ptr + rows, scale, mask=row_ok & is_first_n)
                v = gz * by_row[:, None]
            else:
                v = gz * inverse
            q = to_fp8(v, q_ptr.dtype.element_ty, MAX, EXACT)
            if WHOLE:
                tl.store(q_ptr, q)
            else:
                tl.store(q_ptr, q, mask=(rows < M)[:, None] & inside[None, :])
            q_ptr += N
            # One scale for both is often one product for both.
            held = held + (v if SAME else gz * by_column,)  # type: ignore[assignment]  # noqa: RUF005
        e, f, g, h = held  # type: ignore[misc]
        word = word_of(e, f, g, h, LIKE_T, MAX_T, EXACT)
        if not WHOLE:
            # Rows past M are zeros, beside a NaN scale too: they fill the tail up to M_UP.
            word = first_bytes(word, M - start - step, 4)
        a, b, c, d = b, c, d, word
    # (LINES, BN) twice -> (BN, 2 * LINES)
    lines = tl.permute(tl.join(pair_of(a, b), pair_of(c, d)), (1, 0, 2))
    places = tile_m * (2 * LINES) + tl.arange(0, 2 * LINES)
    to = qt_ptr + columns.to(tl.int64)[:, None] * (M_UP // 8) + places[None, :]
    lines = tl.reshape(lines, (BN, 2 * LINES))
    if WHOLE:
        tl.store(to, lines)
    else:
        tl.store(to, lines, mask=inside[:, None] & (places < M_UP // 8)[None, :])
