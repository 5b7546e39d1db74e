"""Triton code of `fused_backward_blocks`: one read, dL/dz in FP8 in both orientations.

A tile has 128 rows and one block. It is worked off in eight parts, of every eighth row: a thread
then has eight rows of a column side by side, which make one word of the transposed result; bytes
are not turned one by one, which costs more than all the rest. What waits for the scale of its
column waits in registers, as bf16, two rows in a word: `pairs` works on both at once, a third of
the instructions less. A program takes tile after tile of one block of columns in one loop over
pairs of parts, and its reads run ahead in shared memory, from one tile into the next.

Within a part, tiles are (16 rows, groups of columns, 128): half a warp then has a row, whose sums
and maxima take few steps between threads, and reads 16 bytes a thread side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents
from triton.language.extra.cuda import gdc_wait

from loka_compile.kernels.fp8 import to_fp8
from loka_compile.kernels.gradient_tile import gradient_of
from loka_compile.kernels.pairs import inverse_scale_pair
from loka_compile.kernels.pairs import inverse_scales
from loka_compile.kernels.pairs import larger_pair
from loka_compile.kernels.pairs import largest_pair
from loka_compile.kernels.pairs import rounded_pair
from loka_compile.kernels.pairs import word_of_pairs
from loka_compile.kernels.words import first_bytes
from loka_compile.kernels.words import pair_of


@triton.jit
def _store_scales(
    scale_ptr, inverse, first_line, line, first_group, group, LINES, GROUPS, outer, room,
    TURNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Scales of inverse ones, which are bits, of a size that line and group make, offsets from the
    first ones; turned, those past the last line are zeros up to `room`."""
    # Reciprocals of powers of two; NaN stays.
    bits = tl.where(inverse < 0x7F800000, (254 << 23) - inverse, inverse)
    if TURNED:
        scale_ptr += first_group.to(tl.int64) * outer + first_line
        scale_ptr += group * outer + line
    else:
        scale_ptr += first_line.to(tl.int64) * outer + first_group
        scale_ptr += line * outer + group
    there = first_group + group < GROUPS
    if WHOLE:
        tl.store(scale_ptr, bits.to(tl.float32, bitcast=True))
    elif TURNED:
        scale = tl.where(first_line + line < LINES, bits, 0).to(tl.float32, bitcast=True)
        tl.store(scale_ptr, scale, mask=(first_line + line < room) & there)
    else:
        scale = bits.to(tl.float32, bitcast=True)
        tl.store(scale_ptr, scale, mask=(first_line + line < LINES) & there)


@triton.jit
def _kept(word, EXACT: tl.constexpr):
    """`word` as a value of its own, made where it is asked for: Triton pipelines no loop that hands
    one on as it is, and outside its branch it would be made for each of several branches."""
    if not EXACT:
        word = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=False, pack=1
        )
    return word


@triton.jit
def _read(ptr, mask, WHOLE: tl.constexpr):
    """Values that are read once; zero outside `mask`."""
    if WHOLE:
        x = tl.load(ptr, eviction_policy="evict_first")
    else:
        x = tl.load(ptr, mask=mask, other=0.0, eviction_policy="evict_first")
    return x


@triton.jit
def _part(
    gy_ptr, u_ptr, r_ptr, rows, inside, gain, width, M,
    ACT: tl.constexpr, GATE: tl.constexpr, GAIN: tl.constexpr, WHOLE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """(dL/dz, dL/dv * u, mask) of one part, FP32."""
    here = rows < M
    mask = here[:, None, None] & inside
    gy, u = _read(gy_ptr, mask, WHOLE), _read(u_ptr, mask, WHOLE)
    r = tl.load(r_ptr, mask=here, other=1.0) if not WHOLE else tl.load(r_ptr)
    gz, for_gain = gradient_of(gy, u, r[:, None, None], gain, width, ACT, GATE, GAIN, EXACT)
    if not WHOLE:
        # A NaN row's mean reaches past the block.
        gz = tl.where(mask, gz, 0.0)
    return gz, for_gain, mask


@triton.jit
def _write(q_ptr, gz, inverse, mask, WHOLE: tl.constexpr, MAX: tl.constexpr, EXACT: tl.constexpr):
    q = to_fp8(gz * inverse[:, :, None], q_ptr.dtype.element_ty, MAX, EXACT)
    if WHOLE:
        tl.store(q_ptr, q)
    else:
        tl.store(q_ptr, q, mask=mask)


@triton.jit
def _write_turned(ptr, word, lines, filled, M_UP, WHOLE: tl.constexpr):
    """word (columns of dL/dz, 16) where `ptr` points; of `lines` columns and `filled` words."""
    line = tl.arange(0, word.shape[0])[:, None]
    place = tl.arange(0, 16)[None, :]
    ptr += line.to(tl.int64) * (M_UP // 8) + place
    if WHOLE:
        tl.store(ptr, word)
    else:
        tl.store(ptr, word, mask=(line < lines) & (place < filled))


@triton.jit
def blocks_kernel(
    gy_ptr, u_ptr, r_ptr, gain_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, partial_ptr,
    M, M_UP, N, block, blocks, outer, room, outer_t, room_t,
    BN: tl.constexpr, WHOLE: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr,
    GAIN: tl.constexpr, PDL: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
    TURNED: tl.constexpr, MAX: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
    LIKE_T: tl.constexpr, TURNED_T: tl.constexpr, MAX_T: tl.constexpr, EXPONENT_T: tl.constexpr,
    MANTISSA_T: tl.constexpr,
):  # fmt: skip
    """qt_ptr: int64, eight rows of M each. WHOLE: M is a multiple of 128, all blocks BN wide.
    STAGES: of the pipeline; the reads of all but one are under way. Programs are a multiple of the
    blocks."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    GROUPS: tl.constexpr = BN // 128
    eighth = tl.arange(0, 16)
    group = tl.arange(0, GROUPS)
    # A thread has 8 values of a row, not the 16 that would suit q: reads are then side by side.
    along = tl.max_contiguous(tl.arange(0, 128), 8)
    tile_n = tl.program_id(0) % blocks
    lane = tl.program_id(0) // blocks
    lanes = tl.num_programs(0) // blocks
    first = tile_n * block
    local = group[None, :, None] * 128 + along[None, None, :]
    inside = (local < block) & (first + local < N)
    width = BN if WHOLE else tl.minimum(block, N - first).to(tl.float32)
    gain = tl.zeros((1, GROUPS, 128), dtype=tl.float32)
    if GAIN:
        # Read for every row, in the layout of a part: Triton would carry another over to all else.
        spread = gain_ptr + first + local + (eighth * 0)[:, None, None]
        gain = tl.max(tl.load(spread, mask=inside, other=0.0).to(tl.float32), axis=0)[None, :, :]
    # Offsets within a tile are small; groups apart, so that they are constants in the code.
    within = (eighth * 8 * N)[:, None, None] + along[None, None, :]
    apart = group[None, :, None] * 128
    within_r = eighth * (8 * blocks)
    mine = tl.cdiv(tl.cdiv(M, 128) - lane, lanes)
    # Of the first three pairs of parts; distinct, or Triton takes them for one variable.
    a = tl.full((16, GROUPS, 128), 0, tl.int32)
    b = tl.full((16, GROUPS, 128), 1, tl.int32)
    c = tl.full((16, GROUPS, 128), 2, tl.int32)
    # A thread's two rows of a part are summed at once.
    # Of eight rows side by side, exponents of their inverse scales: a byte each, 255 for NaN.
    low = tl.full((16, GROUPS), 0, tl.int32)
    high = tl.full((16, GROUPS), 1, tl.int32)
    total = tl.zeros((8, GROUPS, 128), dtype=tl.float32)
    for turn in tl.range(0, mine * 4, num_stages=STAGES):
        tile_m = lane + turn // 4 * lanes
        pair = turn % 4
        start = tile_m * 128 + eighth * 8
        # 64-bit offsets: M * N passes 2**31 for real batches.
        row = tile_m.to(tl.int64) * 128 + pair * 2
        at = row * N + first
        at_r = row * blocks + tile_n
        even, sum_even, mask = _part(
            gy_ptr + at + within + apart, u_ptr + at + within + apart, r_ptr + at_r + within_r,
            start + pair * 2, inside, gain, width, M, ACT, GATE, GAIN, WHOLE, EXACT,
        )  # fmt: skip
        at_odd = at + N
        odd, sum_odd, mask_odd = _part(
            gy_ptr + at_odd + within + apart, u_ptr + at_odd + within + apart,
            r_ptr + at_r + blocks + within_r,
            start + pair * 2 + 1, inside, gain, width, M, ACT, GATE, GAIN, WHOLE, EXACT,
        )  # fmt: skip
        if GAIN:
            both = tl.reshape(sum_even + sum_odd, (2, 8, GROUPS, 128))
            total = tl.where(pair == 0, 0.0, total) + tl.sum(both, axis=0)
        d = rounded_pair(even, odd, EXACT)
        inverse, inverse_odd = inverse_scales(largest_pair(d, 2, EXACT), EXPONENT, MANTISSA, EXACT)
        _write(q_ptr + at + within + apart, even, inverse, mask, WHOLE, MAX, EXACT)
        _write(q_ptr + at_odd + within + apart, odd, inverse_odd, mask_odd, WHOLE, MAX, EXACT)
        exponents = (inverse.to(tl.int32, bitcast=True) >> 23) | (
            (inverse_odd.to(tl.int32, bitcast=True) >> 23) << 8
        )
        if pair == 0:
            a = _kept(d, EXACT)
            low = _kept(exponents, EXACT)
        elif pair == 1:
            b = _kept(d, EXACT)
            low = _kept(low | (exponents << 16), EXACT)
        elif pair == 2:
            c = _kept(d, EXACT)
            high = _kept(exponents, EXACT)
        else:
            if GAIN:
                # Partial sums, added up outside: atomics would make the result depend on timing.
                sums = tl.sum(total, axis=0)
                to = partial_ptr + tile_m.to(tl.int64) * N + first
                there = group[:, None] * 128 + along[None, :]
                tl.store(to + there, sums, mask=(there < block) & (first + there < N))
            # Scales of rows, all at once.
            power = pair_of(low, high | (exponents << 16))
            power = power[:, None, :] >> (tl.arange(0, 8) * 8)[None, :, None]
            power = (power & 0xFF).to(tl.int32)
            power = tl.where(power == 255, 0x7FC00000, power << 23)
            _store_scales(
                scale_ptr, tl.reshape(power, (128, GROUPS)), tile_m * 128,
                tl.arange(0, 128)[:, None], first // 128, group[None, :],
                M, tl.cdiv(N, 128), outer, room, TURNED, WHOLE,
            )  # fmt: skip
            # Scales of columns. The last block also fills up their places.
            top = larger_pair(larger_pair(a, b, EXACT), larger_pair(c, d, EXACT), EXACT)
            by = inverse_scale_pair(largest_pair(top, 0, EXACT), EXPONENT_T, MANTISSA_T, EXACT)
            line = group[:, None] * 128 + along[None, :]
            if not WHOLE:
                line = tl.where((line < block) | (tile_n == blocks - 1), line, room_t)
            _store_scales(
                scale_t_ptr, by & -0x10000, first, line, tile_m, line * 0, N, tl.cdiv(M, 128),
                outer_t, room_t, TURNED_T, WHOLE,
            )  # fmt: skip
            by = by[None, :, :]
            word = pair_of(
                word_of_pairs(a, b, by, LIKE_T, MAX_T, EXACT),
                word_of_pairs(c, d, by, LIKE_T, MAX_T, EXACT),
            )
            if not WHOLE:
                # Rows past M are zeros, beside a NaN scale too: they fill the tail up to M_UP.
                word = first_bytes(word, M - start, 8)
            qt = qt_ptr + first.to(tl.int64) * (M_UP // 8) + tile_m * 16
            filled = M_UP // 8 - tile_m * 16
            left = tl.minimum(block, N - first)
            if GROUPS == 2:
                # One after the other: shared memory that turns them is better used to read ahead.
                one, other = tl.split(tl.permute(word, (0, 2, 1)))
                _write_turned(qt, tl.trans(one), left, filled, M_UP, WHOLE)
                qt += M_UP.to(tl.int64) * 16
                _write_turned(qt, tl.trans(other), left - 128, filled, M_UP, WHOLE)
            else:
                word = tl.reshape(tl.permute(word, (1, 2, 0)), (BN, 16))
                _write_turned(qt, word, left, filled, M_UP, WHOLE)
