"""The Triton code of `quantize_both` where a tile has one scale: the transposed result by words.

Kinds of scale are numbered as in `quantize_kernels`: 1 tensor, 4 128x128, 5 static. The others,
with a scale for each row or column, are written there: by words they were no faster on an H200.
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


@triton.jit
def _multiplier(
    bits, whole, line_tile, along, scale_ptr, LINES, outer, room, groups,
    KIND: tl.constexpr, TURNED: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """What the tile is multiplied by (KIND 5: divided by); its scale is written.

    bits, whole: maxima of the tile and of the matrix. The tile is number `line_tile` of its LINES
    and `along` of the contraction. A stored block scale has `outer` places from row to row and
    `room` in a row, those without a scale being zero.
    """
    if KIND == 5:
        by = tl.load(scale_ptr)
    elif KIND == 1:
        scale, by = power_of_two(whole, EXPONENT, MANTISSA)
        tl.store(scale_ptr, scale, mask=(line_tile == 0) & (along == 0))
    else:
        scale, by = power_of_two(bits, EXPONENT, MANTISSA)
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
    return by


@triton.jit
def _over(tile, by, KIND: tl.constexpr):
    if KIND == 5:
        # No power of two: divided as the reference divides, to the last bit.
        out = tl.div_rn(tile, tl.zeros_like(tile) + by)
    else:
        out = tile * by
    return out


@triton.jit
def quantize_words_kernel(
    x_ptr, amax_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, R, C, QR, QC, TR, TC,
    stride_r, stride_c, outer, room, outer_t, room_t, parts,
    BR: tl.constexpr, BC: tl.constexpr, ROUND: tl.constexpr, EXACT: tl.constexpr,
    PARTS: tl.constexpr,
    KIND: tl.constexpr, TURNED: tl.constexpr, MAX: tl.constexpr, EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    KIND_T: tl.constexpr, TURNED_T: tl.constexpr, MAX_T: tl.constexpr, EXPONENT_T: tl.constexpr,
    MANTISSA_T: tl.constexpr,
):  # fmt: skip
    """q (QR, QC), qt (TC, TR), TR a multiple of 8. Arguments are those of `quantize_kernel`."""
    EIGHTH: tl.constexpr = BR // 8
    tile_r = tl.program_id(0)
    tile_c = tl.program_id(1)
    start = tile_r * BR + tl.arange(0, EIGHTH) * 8
    # A thread has 8 values of a row, not the 16 that would suit q: reads are then side by side.
    columns = tl.max_contiguous(tile_c * BC + tl.arange(0, BC), 8)
    real_c = columns < C
    xs = ()
    for part in tl.static_range(8):
        # Every eighth row: those of one thread then lie side by side in qt.
        rows = start + part
        mask = (rows < R)[:, None] & real_c[None, :]
        x = load(x_ptr, rows, columns, mask, stride_r, stride_c, ROUND, EXACT)
        xs = xs + (x,)  # type: ignore[assignment]  # noqa: RUF005
    whole = 0
    if KIND == 1 or KIND_T == 1:
        place = tl.arange(0, PARTS)
        whole = tl.max(tl.load(amax_ptr + place, mask=place < parts, other=0), axis=0)
    bits = 0
    if KIND == 4 or KIND_T == 4:
        top = magnitude(xs[0])  # type: ignore[misc]
        for part in tl.static_range(1, 8):
            top = tl.maximum(top, magnitude(xs[part]))
        bits = tl.max(tl.max(top, axis=1), axis=0)
    by = _multiplier(
        bits, whole, tile_r, tile_c, scale_ptr, R, outer, room, tl.cdiv(C, 128),
        KIND, TURNED, EXPONENT, MANTISSA,
    )  # fmt: skip
    for part in tl.static_range(8):
        rows = start + part
        # Places that fill up are zeros, beside a NaN scale too.
        v = tl.where((rows < R)[:, None] & real_c[None, :], _over(xs[part], by, KIND), 0.0)
        at = rows.to(tl.int64)[:, None] * QC + columns[None, :]
        filled = (rows < QR)[:, None] & (columns < QC)[None, :]
        tl.store(q_ptr + at, to_fp8(v, q_ptr.dtype.element_ty, MAX, EXACT), mask=filled)
    by_t = _multiplier(
        bits, whole, tile_c, tile_r, scale_t_ptr, C, outer_t, room_t, tl.cdiv(R, 128),
        KIND_T, TURNED_T, EXPONENT_T, MANTISSA_T,
    )  # fmt: skip
    ts = ()
    for part in tl.static_range(8):
        ts = ts + (_over(xs[part], by_t, KIND_T),)  # type: ignore[assignment]  # noqa: RUF005
    LIKE: tl.constexpr = qt_ptr.dtype.element_ty
    low = word_of(ts[0], ts[1], ts[2], ts[3], LIKE, MAX_T, EXACT)  # type: ignore[misc]
    high = word_of(ts[4], ts[5], ts[6], ts[7], LIKE, MAX_T, EXACT)  # type: ignore[misc]
    word = tl.where(real_c[None, :], first_bytes(pair_of(low, high), R - start, 8), 0)
    words_ptr = qt_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    places = tile_r * EIGHTH + tl.arange(0, EIGHTH)
    to = words_ptr + columns.to(tl.int64)[:, None] * (TR // 8) + places[None, :]
    tl.store(to, tl.trans(word), mask=(columns < TC)[:, None] & (places < TR // 8)[None, :])
