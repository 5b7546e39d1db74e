"""Triton code of `fused_backward_blocks`: one read, dL/dz in FP8 in both orientations.

A tile has 128 rows and one block. It is worked off in eight parts, of every eighth row: a thread
then has eight rows of a column side by side, which make one word of the transposed result; bytes
are not turned one by one, which costs more than all the rest. What waits for the scale of its
column waits in registers, as bf16. A program takes tile after tile in one loop over pairs of parts,
and its reads run ahead in shared memory, from one tile into the next: memory never waits for the
end of a tile.
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
from loka_compile.kernels.gradient_tile import read_rows
from loka_compile.kernels.words import first_bytes
from loka_compile.kernels.words import pair_of
from loka_compile.kernels.words import word_of


@triton.jit
def _store_scales(
    scale_ptr, scale, lines, groups, LINES, GROUPS, outer, room, TURNED: tl.constexpr
):  # fmt: skip
    """`scale` (lines, groups); turned, those past the last line are zeros up to `room`."""
    there = (groups < GROUPS)[None, :]
    at = lines.to(tl.int64)[:, None]
    real = (lines < LINES)[:, None]
    if TURNED:
        value = tl.where(real, scale, 0.0)
        mask = (lines < room)[:, None] & there
        tl.store(scale_ptr + groups[None, :].to(tl.int64) * outer + at, value, mask=mask)
    else:
        tl.store(scale_ptr + at * outer + groups[None, :], scale, mask=real & there)


@triton.jit
def _pair(low, high, EXACT: tl.constexpr):
    """Two FP32 tiles -> one of int32: both rounded to bf16, `low` in the low half."""
    if EXACT:
        bits = (to_bf16(low, EXACT).to(tl.int32, bitcast=True) >> 16) & 0xFFFF
        bits |= to_bf16(high, EXACT).to(tl.int32, bitcast=True) & -0x10000
    else:
        bits = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    return bits


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
    """Four bf16 of two words, times `by` -> one word of four FP8, `a` the lowest byte."""
    a = (ab << 16).to(tl.float32, bitcast=True) * by
    b = (ab & -0x10000).to(tl.float32, bitcast=True) * by
    c = (cd << 16).to(tl.float32, bitcast=True) * by
    d = (cd & -0x10000).to(tl.float32, bitcast=True) * by
    return word_of(a, b, c, d, like, MAX, EXACT)


@triton.jit
def _moved(word, EXACT: tl.constexpr):
    """`word` as a value of its own: Triton pipelines no loop that hands one on as it is."""
    if not EXACT:
        word = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )
    return word


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
    STAGES: of the pipeline; the reads of all but one are under way."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    GROUPS: tl.constexpr = BN // 128
    local = tl.arange(0, BN)
    eighth = tl.arange(0, 16)
    tiles = tl.cdiv(M, 128) * blocks
    mine = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    # Of eight parts of a tile, in pairs; distinct, or Triton takes them for one variable.
    a = tl.full((16, BN), 0, tl.int32)
    b = tl.full((16, BN), 1, tl.int32)
    c = tl.full((16, BN), 2, tl.int32)
    d = tl.full((16, BN), 3, tl.int32)
    total = tl.zeros((16, BN), dtype=tl.float32)
    for turn in tl.range(0, mine * 4, num_stages=STAGES):
        tile = tl.program_id(0) + turn // 4 * tl.num_programs(0)
        pair = turn % 4
        tile_m = tile // blocks
        tile_n = tile % blocks
        first = tile_n * block
        # A thread has 8 values of a row, not the 16 that would suit q: reads are then side by side.
        columns = tl.max_contiguous(first + local, 8)
        inside = (local < block) & (columns < N)
        width = tl.minimum(block, N - first).to(tl.float32)
        groups = first // 128 + tl.arange(0, GROUPS)
        gain = tl.zeros((BN,), dtype=tl.float32)
        if GAIN:
            gain = tl.load(gain_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            total = tl.where(pair == 0, 0.0, total)
        start = tile_m * 128 + eighth * 8
        even = total
        for part in tl.static_range(2):
            # Every eighth row: those of one thread then lie side by side in qt.
            rows = start + pair * 2 + part
            # 64-bit offsets: M * N passes 2**31 for real batches.
            at = rows.to(tl.int64)[:, None] * N + columns[None, :]
            by_row = rows.to(tl.int64) * blocks + tile_n
            gy, u, r = read_rows(
                gy_ptr + at, u_ptr + at, r_ptr + by_row, rows, inside, M, True, WHOLE
            )
            gz, for_gain = gradient_of(
                gy.to(tl.float32), u.to(tl.float32), r, gain, width, ACT, GATE, GAIN
            )
            mask = (rows < M)[:, None] & inside[None, :]
            if not WHOLE:
                # A NaN row's mean reaches past the block.
                gz = tl.where(mask, gz, 0.0)
            if GAIN:
                total += for_gain
            most = tl.max(tl.reshape(magnitude(gz), (16, GROUPS, 128)), axis=2)
            scale, inverse = power_of_two(most, EXPONENT, MANTISSA)
            _store_scales(
                scale_ptr, scale, rows, groups, M, tl.cdiv(N, 128), outer, room, TURNED
            )  # fmt: skip
            v = tl.reshape(tl.reshape(gz, (16, GROUPS, 128)) * inverse[:, :, None], (16, BN))
            q = to_fp8(v, q_ptr.dtype.element_ty, MAX, EXACT)
            if WHOLE:
                tl.store(q_ptr + at, q)
            else:
                tl.store(q_ptr + at, q, mask=mask)
            if part == 0:
                even = gz
            else:
                a, b, c = _moved(b, EXACT), _moved(c, EXACT), _moved(d, EXACT)
                d = _pair(even, gz, EXACT)
        if pair == 3:
            if GAIN:
                # Partial sums, added up outside: atomics would make the result depend on timing.
                sums = tl.sum(total, axis=0)
                tl.store(partial_ptr + tile_m.to(tl.int64) * N + columns, sums, mask=inside)
            top = _larger(_larger(a, b, EXACT), _larger(c, d, EXACT), EXACT)
            most_t = tl.max(tl.maximum(top << 16, top & 0x7FFF0000), axis=0)
            scale_t, inverse_t = power_of_two(most_t, EXPONENT_T, MANTISSA_T)
            # The last block also fills up the scales' places.
            lines = tl.where((local < block) | (tile_n == blocks - 1), columns, room_t)
            _store_scales(
                scale_t_ptr, scale_t[:, None], lines, tile_m + tl.arange(0, 1), N, tl.cdiv(M, 128),
                outer_t, room_t, TURNED_T,
            )  # fmt: skip
            by = inverse_t[None, :]
            low = _word(a, b, by, LIKE_T, MAX_T, EXACT)
            high = _word(c, d, by, LIKE_T, MAX_T, EXACT)
            word = pair_of(low, high)
            if not WHOLE:
                # Rows past M are zeros, beside a NaN scale too: they fill the tail up to M_UP.
                word = first_bytes(word, M - start, 8)
            places = tile_m * 16 + eighth
            to = qt_ptr + columns.to(tl.int64)[:, None] * (M_UP // 8) + places[None, :]
            if WHOLE:
                tl.store(to, tl.trans(word))
            else:
                tl.store(to, tl.trans(word), mask=inside[:, None] & (places < M_UP // 8)[None, :])
