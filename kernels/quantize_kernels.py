"""The Triton code of `quantize_both`: maxima of a matrix, and FP8 forms from one read of a tile.

Kinds of scale are numbered: 0 none, 1 tensor, 2 row, 3 1x128, 4 128x128, 5 static.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loka_compile.kernels.fp8 import apart
from loka_compile.kernels.fp8 import magnitude
from loka_compile.kernels.fp8 import power_of_two
from loka_compile.kernels.fp8 import to_bf16
from loka_compile.kernels.fp8 import to_fp8


@triton.jit
def load(
    x_ptr, rows, columns, mask, stride_r, stride_c, ROUND: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """One tile in FP32, rounded to bf16 (ROUND = 1) or fp16 (2) on the way; zero outside."""
    # 64-bit offsets: R * C passes 2**31 for real batches.
    at = rows.to(tl.int64)[:, None] * stride_r + columns.to(tl.int64)[None, :] * stride_c
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if ROUND == 1:
        x = to_bf16(x, EXACT)
    elif ROUND == 2:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def amax_kernel(
    x_ptr, amax_ptr, R, C, stride_r, stride_c,
    BR: tl.constexpr, BC: tl.constexpr, ROUND: tl.constexpr, EXACT: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """amax bits, where asked for: of all, one per program and to be joined; then C of the columns
    and R of the rows, which must be zero beforehand."""
    tiles_r = tl.cdiv(R, BR)
    tiles = tiles_r * tl.cdiv(C, BC)
    at = amax_ptr
    if WHOLE:
        at += tl.num_programs(0)
    whole = tl.zeros((BC,), dtype=tl.int32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        rows = (tile % tiles_r) * BR + tl.arange(0, BR)
        columns = (tile // tiles_r) * BC + tl.arange(0, BC)
        mask = (rows < R)[:, None] & (columns < C)[None, :]
        x = load(x_ptr, rows, columns, mask, stride_r, stride_c, ROUND, EXACT)
        bits = magnitude(x)
        if WHOLE or COLUMNS:
            top = tl.max(bits, axis=0)
            whole = tl.maximum(whole, top)
        if COLUMNS:
            tl.atomic_max(at + columns, top, mask=columns < C, sem="relaxed")
        if ROWS:
            by_row = at + C if COLUMNS else at
            tl.atomic_max(by_row + rows, tl.max(bits, axis=1), mask=rows < R, sem="relaxed")
    if WHOLE:
        tl.store(amax_ptr + tl.program_id(0), tl.max(whole, axis=0))


@triton.jit
def _scaled(
    tile, lines, line_tile, along, amax_ptr, whole, scale_ptr, LINES, outer, room, groups,
    KIND: tl.constexpr, TURNED: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """`tile` (lines, contraction) over its scale, which is written.

    The tile is number `line_tile` of its lines and `along` of the contraction. A stored block scale
    has `outer` places from row to row and `room` in a row, those without a scale being zero.
    """
    real = lines < LINES
    if KIND == 5:
        # No power of two: divided as the reference divides, to the last bit.
        out = tl.div_rn(tile, tl.zeros_like(tile) + tl.load(scale_ptr))
    elif KIND == 1:
        scale, inverse = power_of_two(whole, EXPONENT, MANTISSA)
        tl.store(scale_ptr, scale, mask=(line_tile == 0) & (along == 0))
        out = tile * inverse
    elif KIND == 2:
        bits = tl.load(amax_ptr + lines, mask=real, other=0)
        scale, inverse = power_of_two(bits, EXPONENT, MANTISSA)
        tl.store(scale_ptr + lines, scale, mask=real & (along == 0))
        out = tile * inverse[:, None]
    elif KIND == 3:
        bits = tl.max(magnitude(tile), axis=1)
        scale, inverse = power_of_two(bits, EXPONENT, MANTISSA)
        at = lines.to(tl.int64)
        if TURNED:
            held = (lines < room) & (along < groups)
            tl.store(scale_ptr + along * outer + at, tl.where(real, scale, 0.0), mask=held)
        else:
            tl.store(scale_ptr + at * outer + along, scale, mask=real & (along < groups))
        out = tile * inverse[:, None]
    else:
        bits = tl.max(tl.max(magnitude(tile), axis=1), axis=0)
        scale, inverse = power_of_two(bits, EXPONENT, MANTISSA)
        near = tl.arange(0, 4)
        blocks = tl.cdiv(LINES, 128)
        inner = line_tile if TURNED else along
        count = blocks if TURNED else groups
        row = along if TURNED else line_tile
        # The last of a row also writes the places that fill it up.
        held = (near == 0) | ((inner == count - 1) & (inner + near < room))
        held = held & (line_tile < blocks) & (along < groups)
        value = tl.where(near == 0, scale, 0.0)
        tl.store(scale_ptr + row * outer + inner + near, value, mask=held)
        out = tile * inverse
    return out


@triton.jit
def quantize_kernel(
    x_ptr, amax_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, R, C, QR, QC, TR, TC,
    stride_r, stride_c, outer, room, outer_t, room_t, parts, zero,
    BR: tl.constexpr, BC: tl.constexpr, ROUND: tl.constexpr, EXACT: tl.constexpr,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    KIND: tl.constexpr, TURNED: tl.constexpr, MAX: tl.constexpr, EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    KIND_T: tl.constexpr, TURNED_T: tl.constexpr, MAX_T: tl.constexpr, EXPONENT_T: tl.constexpr,
    MANTISSA_T: tl.constexpr,
):  # fmt: skip
    """q (QR, QC), qt (TC, TR): sizes filled up; KIND 0 leaves an orientation out. PARTS: the maxima
    of all, `parts`, up to a power of two. zero: 0, see `fp8.apart`."""
    tile_r = tl.program_id(0)
    tile_c = tl.program_id(1)
    rows = tile_r * BR + tl.arange(0, BR)
    columns = tile_c * BC + tl.arange(0, BC)
    mask = (rows < R)[:, None] & (columns < C)[None, :]
    x = load(x_ptr, rows, columns, mask, stride_r, stride_c, ROUND, EXACT)
    whole = 0
    if KIND == 1 or KIND_T == 1:
        part = tl.arange(0, PARTS)
        whole = tl.max(tl.load(amax_ptr + part, mask=part < parts, other=0), axis=0)
    by_column = amax_ptr + parts
    by_row = by_column + (C if COLUMNS else 0)
    if KIND > 0:
        v = _scaled(
            x, rows, tile_r, tile_c, by_row, whole, scale_ptr, R, outer, room,
            tl.cdiv(C, 128), KIND, TURNED, EXPONENT, MANTISSA,
        )  # fmt: skip
        # Places that fill up are zeros, beside a NaN scale too.
        q = to_fp8(tl.where(mask, v, 0.0), q_ptr.dtype.element_ty, MAX, EXACT)
        at = rows.to(tl.int64)[:, None] * QC + columns[None, :]
        tl.store(q_ptr + at, q, mask=(rows < QR)[:, None] & (columns < QC)[None, :])
    if KIND_T > 0:
        # Transposed before it is rounded: see `fp8.apart`.
        t = _scaled(
            tl.trans(x), columns, tile_c, tile_r, by_column, apart(whole, zero), scale_t_ptr, C,
            outer_t, room_t, tl.cdiv(R, 128), KIND_T, TURNED_T, EXPONENT_T, MANTISSA_T,
        )  # fmt: skip
        turned = (columns < C)[:, None] & (rows < R)[None, :]
        qt = to_fp8(tl.where(turned, t, 0.0), qt_ptr.dtype.element_ty, MAX_T, EXACT)
        at = columns.to(tl.int64)[:, None] * TR + rows[None, :]
        tl.store(qt_ptr + at, qt, mask=(columns < TC)[:, None] & (rows < TR)[None, :])
