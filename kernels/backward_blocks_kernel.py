"""Triton code of `fused_backward_blocks`: one read, dL/dz in FP8 in both orientations.

A program has one tile of 128 rows and one block. It works in steps of every 16th row: a thread then
ends up with 16 rows of a column side by side, which are 16 bytes of the transposed result, and
writes them as they lie in its registers. What waits for the scale of its column waits as bf16. The
steps are a loop and not unrolled: code that runs once per tile would be fetched more slowly than it
runs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents
from triton.language.extra.cuda import gdc_wait

from loka_compile.kernels.fp8 import magnitude
from loka_compile.kernels.fp8 import power_of_two
from loka_compile.kernels.fp8 import to_bf16
from loka_compile.kernels.fp8 import to_fp8
from loka_compile.kernels.gradient_tile import gradient_of
from loka_compile.kernels.turned_words import kept
from loka_compile.kernels.turned_words import put
from loka_compile.kernels.turned_words import put_words
from loka_compile.kernels.turned_words import read
from loka_compile.kernels.turned_words import word_of


@triton.jit
def _put_scales(
    scale_ptr, scale, lines, groups, LINES, GROUPS, outer, room, TURNED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """`scale` (lines, groups); turned, those past the last line are zeros up to `room`."""
    there = (groups < GROUPS)[None, :]
    at = lines.to(tl.int64)[:, None]
    if TURNED:
        to = scale_ptr + groups[None, :].to(tl.int64) * outer + at
        mask = (lines < room)[:, None] & there
        scale = tl.where((lines < LINES)[:, None], scale, 0.0)
    else:
        to = scale_ptr + at * outer + groups[None, :]
        mask = (lines < LINES)[:, None] & there
    put(to, scale, mask, EXACT)


@triton.jit
def _pair(low, high, EXACT: tl.constexpr):
    """Two FP32 tiles -> one of int32: both rounded to bf16, `low` in the low half."""
    if EXACT:
        pair = (to_bf16(low, EXACT).to(tl.int32, bitcast=True) >> 16) & 0xFFFF
        pair |= to_bf16(high, EXACT).to(tl.int32, bitcast=True) & -0x10000
    else:
        pair = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    return pair


@triton.jit
def _larger(a, b, EXACT: tl.constexpr):
    """Two pairs of bf16 -> the pair of larger magnitudes, as bits: NaN is above all."""
    SIGNS: tl.constexpr = 0x7FFF7FFF
    if EXACT:
        low = tl.maximum(a & 0x7FFF, b & 0x7FFF)
        most = low | tl.maximum(a & 0x7FFF0000, b & 0x7FFF0000)
    else:
        most = tl.inline_asm_elementwise(
            "max.u16x2 $0, $1, $2;", "=r,r,r", [a & SIGNS, b & SIGNS], dtype=tl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    return most


@triton.jit
def _word(ab, cd, by, like: tl.constexpr, MAX: tl.constexpr, EXACT: tl.constexpr):
    """Two pairs of bf16, times `by` -> one word of four FP8, the first in the lowest byte."""
    a = (ab << 16).to(tl.float32, bitcast=True) * by
    b = (ab & -0x10000).to(tl.float32, bitcast=True) * by
    c = (cd << 16).to(tl.float32, bitcast=True) * by
    d = (cd & -0x10000).to(tl.float32, bitcast=True) * by
    return word_of(a, b, c, d, like, MAX, EXACT)


@triton.jit
def blocks_kernel(
    gy_ptr, u_ptr, r_ptr, gain_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, partial_ptr,
    M, M_UP, N, block, blocks, outer, room, outer_t, room_t,
    BN: tl.constexpr, WHOLE: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr,
    GAIN: tl.constexpr, PDL: tl.constexpr, EXACT: tl.constexpr,
    TURNED: tl.constexpr, MAX: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
    LIKE_T: tl.constexpr, TURNED_T: tl.constexpr, MAX_T: tl.constexpr, EXPONENT_T: tl.constexpr,
    MANTISSA_T: tl.constexpr,
):  # fmt: skip
    """qt_ptr: int32, four rows of M a word. WHOLE: M is a multiple of 128, all blocks BN wide."""
    GROUPS: tl.constexpr = BN // 128
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile_m = tl.program_id(0) // blocks
    tile_n = tl.program_id(0) % blocks
    first = tile_n * block
    local = tl.arange(0, BN)
    columns = first + local
    inside = (local < block) & (columns < N)
    width = tl.minimum(block, N - first).to(tl.float32)
    groups = first // 128 + tl.arange(0, GROUPS)
    gain = tl.zeros((BN,), dtype=tl.float32)
    if GAIN:
        gain = tl.load(gain_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((8, BN), dtype=tl.float32)
    start = tile_m * 128 + tl.arange(0, 8) * 16
    # 64-bit offsets: M * N passes 2**31 for real batches.
    at = start.to(tl.int64)[:, None] * N + columns[None, :]
    gy_ptr += at
    u_ptr += at
    q_ptr += at
    r_ptr += start.to(tl.int64) * blocks + tile_n
    gy, u, r = read(gy_ptr, u_ptr, r_ptr, start, inside, M, True, WHOLE, "evict_first")
    empty = tl.zeros((8, BN), dtype=tl.int32)
    # Eight pairs of rows, the oldest first.
    a, b, c, d, e, f, g, h = empty, empty, empty, empty, empty, empty, empty, empty
    for step in range(0, 16, 4):
        pairs = ()
        even = total
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
            gz, for_gain = gradient_of(here_gy, here_u, here_r, gain, width, ACT, GATE, GAIN)
            mask = (rows < M)[:, None] & inside[None, :]
            if not WHOLE:
                # A NaN row's mean reaches past the block.
                gz = tl.where(mask, gz, 0.0)
            if GAIN:
                total += for_gain
            most = tl.max(tl.reshape(magnitude(gz), (8, GROUPS, 128)), axis=2)
            scale, inverse = power_of_two(most, EXPONENT, MANTISSA)
            _put_scales(
                scale_ptr, scale, rows, groups, M, tl.cdiv(N, 128), outer, room, TURNED, EXACT
            )  # fmt: skip
            v = tl.reshape(tl.reshape(gz, (8, GROUPS, 128)) * inverse[:, :, None], (8, BN))
            q = to_fp8(v, q_ptr.dtype.element_ty, MAX, EXACT)
            if WHOLE:
                tl.store(q_ptr, q)
            else:
                tl.store(q_ptr, q, mask=mask)
            q_ptr += N
            if part % 2 == 0:
                even = gz
            else:
                pairs = pairs + (_pair(even, gz, EXACT),)  # type: ignore[assignment]  # noqa: RUF005
        a, b, c, d, e, f = c, d, e, f, g, h
        g, h = pairs  # type: ignore[misc]
    if GAIN:
        # Partial sums, added up outside: atomics would make the result depend on timing.
        sums = tl.sum(total, axis=0)
        tl.store(partial_ptr + tile_m.to(tl.int64) * N + columns, sums, mask=inside)
    top = _larger(_larger(a, b, EXACT), _larger(c, d, EXACT), EXACT)
    top = _larger(top, _larger(_larger(e, f, EXACT), _larger(g, h, EXACT), EXACT), EXACT)
    most_t = tl.max(tl.maximum(top << 16, top & 0x7FFF0000), axis=0)
    scale_t, inverse_t = power_of_two(most_t, EXPONENT_T, MANTISSA_T)
    # The last block also fills up the scales' places.
    lines = tl.where((local < block) | (tile_n == blocks - 1), columns, room_t)
    _put_scales(
        scale_t_ptr, scale_t[:, None], lines, tile_m + tl.arange(0, 1), N, tl.cdiv(M, 128),
        outer_t, room_t, TURNED_T, EXACT,
    )  # fmt: skip
    by = inverse_t[None, :]
    first_word = _word(a, b, by, LIKE_T, MAX_T, EXACT)
    second = _word(c, d, by, LIKE_T, MAX_T, EXACT)
    third = _word(e, f, by, LIKE_T, MAX_T, EXACT)
    fourth = _word(g, h, by, LIKE_T, MAX_T, EXACT)
    if not WHOLE:
        # Rows past M are zeros, beside a NaN scale too: they fill the tail up to M_UP.
        first_word = kept(first_word, M - start)
        second = kept(second, M - start - 4)
        third = kept(third, M - start - 8)
        fourth = kept(fourth, M - start - 12)
    to = qt_ptr + (columns.to(tl.int64)[None, :] * M_UP + start[:, None]) // 4
    mask = (start < M_UP)[:, None] & inside[None, :]
    put_words(to, first_word, second, third, fourth, mask, EXACT)
