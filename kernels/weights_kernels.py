"""The Triton code of `quantize_weights`: maxima of many matrices, and their FP8 forms.

A table (int64) has a row for each matrix, then for each program of the first launch the number of
its matrix, then the same for the second launch. Matrices lie as memory has them, rows of
neighbouring values; which of the two orientations is w8 is the launcher's business. Kinds of scale
are numbered as in `quantize_kernels`: 1 tensor, 2 row, 4 128x128.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loka_compile.kernels.fp8 import magnitude
from loka_compile.kernels.fp8 import power_of_two
from loka_compile.kernels.fp8 import to_fp8
from loka_compile.kernels.quantize_kernels import load
from loka_compile.kernels.words import first_bytes
from loka_compile.kernels.words import pair_of
from loka_compile.kernels.words import word_of

#: Columns of the table: of the matrix its address, sizes and values from row to row; rows of its
#: two results, with those that fill up; kinds of their scales; where results and scales begin;
#: where the maxima of its rows and columns begin among those of all; its first program of either
#: launch, and how many it has in the first, each of which leaves a maximum.
ADDRESS = tl.constexpr(0)
ROWS = tl.constexpr(1)
COLUMNS = tl.constexpr(2)
STRIDE = tl.constexpr(3)
Q_ROWS = tl.constexpr(4)
T_ROWS = tl.constexpr(5)
KIND = tl.constexpr(6)
KIND_T = tl.constexpr(7)
Q_AT = tl.constexpr(8)
T_AT = tl.constexpr(9)
SCALE_AT = tl.constexpr(10)
SCALE_T_AT = tl.constexpr(11)
BY_ROW = tl.constexpr(12)
BY_COLUMN = tl.constexpr(13)
FIRST = tl.constexpr(14)
FIRST_TILE = tl.constexpr(15)
SHARES = tl.constexpr(16)
FIELDS = tl.constexpr(17)


@triton.jit
def _matrix(row, LIKE: tl.constexpr, EVEN: tl.constexpr):
    """-> address, rows, columns, stride. EVEN: what columns and stride are multiples of."""
    x_ptr = tl.load(row + ADDRESS).to(tl.pointer_type(LIKE))
    R = tl.load(row + ROWS).to(tl.int32)
    C = tl.load(row + COLUMNS).to(tl.int32)
    stride = tl.load(row + STRIDE)
    if EVEN > 1:
        # What Triton knows of an argument, and not of a number in memory.
        x_ptr = tl.multiple_of(x_ptr, 16)
        C = tl.multiple_of(C, EVEN)
        stride = tl.multiple_of(stride, EVEN)
    return x_ptr, R, C, stride


@triton.jit
def maxima_kernel(
    table, amax_ptr, programs_at,
    LIKE: tl.constexpr, ROUND: tl.constexpr, EXACT: tl.constexpr, LINES: tl.constexpr,
    EVEN: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """amax bits: one per program; where some matrix has scales by row (LINES) then those of its
    rows or columns, which must be zero beforehand."""
    pid = tl.program_id(0)
    row = table + tl.load(table + programs_at + pid) * FIELDS
    x_ptr, R, C, stride = _matrix(row, LIKE, EVEN)
    shares = tl.load(row + SHARES).to(tl.int32)
    share = pid - tl.load(row + FIRST).to(tl.int32)
    across = tl.cdiv(C, BC)
    by_row = tl.load(row + KIND) == 2
    by_column = tl.load(row + KIND_T) == 2
    top = tl.zeros((1 if LINES else BR, BC), dtype=tl.int32)
    for tile in range(share, tl.cdiv(R, BR) * across, shares):
        rows = (tile // across) * BR + tl.arange(0, BR)
        columns = (tile % across) * BC + tl.arange(0, BC)
        mask = (rows < R)[:, None] & (columns < C)[None, :]
        bits = magnitude(load(x_ptr, rows, columns, mask, stride, 1, ROUND, EXACT))
        if LINES:
            to = amax_ptr + tl.load(row + BY_ROW) + rows
            tl.atomic_max(to, tl.max(bits, axis=1), mask=(rows < R) & by_row, sem="relaxed")
            bits = tl.max(bits, axis=0, keep_dims=True)
            to = amax_ptr + tl.load(row + BY_COLUMN) + columns[None, :]
            tl.atomic_max(to, bits, mask=(columns < C)[None, :] & by_column, sem="relaxed")
        top = tl.maximum(top, bits)
    tl.store(amax_ptr + pid, tl.max(tl.max(top, axis=1), axis=0))


@triton.jit
def _settled(
    kind, whole, tile_top, scale_ptr, line_tile, along, groups,
    BLOCKS: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """What a tile with one scale is multiplied by, and the bits of its maximum; writes the scale.
    The tile is number `line_tile` of its lines and `along` of `groups` of the contraction."""
    bits = whole
    at = 0
    mine = (kind == 1) & (line_tile == 0) & (along == 0)
    if BLOCKS:
        bits = tl.where(kind == 4, tile_top, whole)
        at = tl.where(kind == 4, line_tile * groups + along, 0)
        mine = mine | (kind == 4)
    scale, inverse = power_of_two(bits, EXPONENT, MANTISSA)
    tl.store(scale_ptr + at, scale, mask=mine)
    return inverse, bits


@triton.jit
def _by_line(
    kind, bits, amax_ptr, scale_ptr, lines, LINES, along,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """What each of `lines` is multiplied by; writes its scale, where it has one of its own."""
    own = (kind == 2) & (lines < LINES)
    bits = tl.where(kind == 2, tl.load(amax_ptr + lines, mask=own, other=0), bits)
    scale, inverse = power_of_two(bits, EXPONENT, MANTISSA)
    tl.store(scale_ptr + lines, scale, mask=own & (along == 0))
    return inverse


@triton.jit
def cast_kernel(
    table, amax_ptr, q_ptr, qt_ptr, scale_ptr, programs_at,
    LIKE: tl.constexpr, ROUND: tl.constexpr, EXACT: tl.constexpr, LINES: tl.constexpr,
    EVEN: tl.constexpr,
    WHOLE: tl.constexpr, BLOCKS: tl.constexpr, SHARES_UP: tl.constexpr, SIZE: tl.constexpr,
    MAX: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
    MAX_T: tl.constexpr, EXPONENT_T: tl.constexpr, MANTISSA_T: tl.constexpr,
):  # fmt: skip
    """A program per tile. WHOLE, LINES, BLOCKS: some matrix has such scales. SHARES_UP: a power of
    two that no matrix has more maxima than."""
    LIKE_T: tl.constexpr = qt_ptr.dtype.element_ty
    EIGHTH: tl.constexpr = SIZE // 8
    # Backwards: L2 holds what the first launch read last.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = table + tl.load(table + programs_at + tile) * FIELDS
    x_ptr, R, C, stride = _matrix(row, LIKE, EVEN)
    kind = tl.load(row + KIND)
    kind_t = tl.load(row + KIND_T)
    tile -= tl.load(row + FIRST_TILE).to(tl.int32)
    across = tl.cdiv(C, SIZE)
    tile_r = tile // across
    tile_c = tile % across
    start = tile_r * SIZE + tl.arange(0, EIGHTH) * 8
    # A thread has 8 values of a row, not the 16 that would suit q: reads are then side by side.
    columns = tl.max_contiguous(tile_c * SIZE + tl.arange(0, SIZE), 8)
    real = columns < C
    whole = 0
    if WHOLE:
        share = tl.arange(0, SHARES_UP)
        some = share < tl.load(row + SHARES)
        whole = tl.max(tl.load(amax_ptr + tl.load(row + FIRST) + share, mask=some, other=0), axis=0)
    xs = ()
    tile_top = 0
    if BLOCKS:
        top = tl.zeros((EIGHTH, SIZE), dtype=tl.int32)
        for part in tl.static_range(8):
            rows = start + part
            mask = (rows < R)[:, None] & real[None, :]
            x = load(x_ptr, rows, columns, mask, stride, 1, ROUND, EXACT)
            top = tl.maximum(top, magnitude(x))
            xs = xs + (x,)  # type: ignore[assignment]  # noqa: RUF005
        tile_top = tl.max(tl.max(top, axis=1), axis=0)
    scales = scale_ptr + tl.load(row + SCALE_AT)
    by, bits = _settled(
        kind, whole, tile_top, scales, tile_r, tile_c, across, BLOCKS, EXPONENT, MANTISSA
    )
    scales_t = scale_ptr + tl.load(row + SCALE_T_AT)
    down = tl.cdiv(R, SIZE)
    by_t, bits_t = _settled(
        kind_t, whole, tile_top, scales_t, tile_c, tile_r, down, BLOCKS, EXPONENT_T, MANTISSA_T
    )
    if LINES:
        at = amax_ptr + tl.load(row + BY_COLUMN)
        by_t = _by_line(kind_t, bits_t, at, scales_t, columns, C, tile_r, EXPONENT_T, MANTISSA_T)
        by_t = by_t[None, :]
    q_ptr += tl.multiple_of(tl.load(row + Q_AT), 128)
    Q_COLUMNS = tl.cdiv(C, 16) * 16
    filled = tl.load(row + Q_ROWS)
    words = ()
    # In halves: what is read at once fills the registers, and keeps other programs off the SM.
    for half in tl.static_range(2):
        vs = ()
        for part in tl.static_range(4):
            if BLOCKS:
                x = xs[half * 4 + part]  # type: ignore[misc]
            else:
                rows = start + (half * 4 + part)
                mask = (rows < R)[:, None] & real[None, :]
                x = load(x_ptr, rows, columns, mask, stride, 1, ROUND, EXACT)
            vs = vs + (x,)  # type: ignore[assignment]  # noqa: RUF005
        for part in tl.static_range(4):
            # Every eighth row: those of one thread then lie side by side in qt.
            rows = start + (half * 4 + part)
            if LINES:
                at = amax_ptr + tl.load(row + BY_ROW)
                lines = _by_line(kind, bits, at, scales, rows, R, tile_c, EXPONENT, MANTISSA)
                v = vs[part] * lines[:, None]  # type: ignore[misc]
            else:
                v = vs[part] * by  # type: ignore[misc]
            # Places that fill up are zeros, beside a NaN scale too.
            v = tl.where((rows < R)[:, None] & real[None, :], v, 0.0)
            q = to_fp8(v, q_ptr.dtype.element_ty, MAX, EXACT)
            to = q_ptr + rows.to(tl.int64)[:, None] * Q_COLUMNS + columns[None, :]
            tl.store(to, q, mask=(rows < filled)[:, None] & (columns < Q_COLUMNS)[None, :])
        a, b, c, d = vs[0], vs[1], vs[2], vs[3]  # type: ignore[misc]
        word = word_of(a * by_t, b * by_t, c * by_t, d * by_t, LIKE_T, MAX_T, EXACT)
        words = words + (word,)  # type: ignore[assignment]  # noqa: RUF005
    word = pair_of(words[0], words[1])  # type: ignore[misc]
    word = tl.where(real[None, :], first_bytes(word, R - start, 8), 0)
    T_COLUMNS = tl.cdiv(R, 16) * 2
    places = tile_r * EIGHTH + tl.arange(0, EIGHTH)
    t_ptr = qt_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    t_ptr += tl.multiple_of(tl.load(row + T_AT) // 8, 16)
    to = t_ptr + columns.to(tl.int64)[:, None] * T_COLUMNS + places[None, :]
    mask = (columns < tl.load(row + T_ROWS))[:, None] & (places < T_COLUMNS)[None, :]
    tl.store(to, tl.trans(word), mask=mask)
