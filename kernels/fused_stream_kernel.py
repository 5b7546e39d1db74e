"""The fused chain where its tiles are more than half of the programs, but fewer: K shared unevenly.

80 tiles of 128 x 256 leave 52 of 132 SMs idle, and no split of all of them is resident at once;
twice as many tiles of 64 rows read more operands from L2 than it can give. So a tile has an owner,
which takes the first `head` of its steps along K, and the remaining programs, its helpers, share
the other steps of all tiles evenly, as one line on which each has a contiguous range (stream-K).
With `head` = 0 there are no owners: all programs share all steps.

A part of a tile is left in a workspace as a partial sum; who comes last finds the others there,
adds them up and runs the epilogue. That is the owner, if `head` is long enough, and its own part
never leaves the registers. Nobody waits for anybody, so programs need not be resident at once. All
parts are rounded and added in an order that does not depend on who comes last: neither do results.
The last one also clears the tile's counter, for the next launch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents
from triton.language.extra.cuda import gdc_wait

from loka_compile.kernels.fused_tile import columns_of
from loka_compile.kernels.fused_tile import finish
from loka_compile.kernels.fused_tile import product
from loka_compile.kernels.fused_tile import rows_of


@triton.jit
def _to_line(acc, BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr):
    """(BM, BN) -> (BM * BN,), ordered as Hopper's product has it in its registers: 16 bytes of a
    thread lie together, so that they are written without shared memory. WIDE: of FP32."""
    parts = tl.reshape(acc, (BM // 16, 2, 8, BN // 16, 2, 4, 2))
    if WIDE:
        parts = tl.permute(parts, (3, 4, 0, 2, 5, 1, 6))
    else:
        parts = tl.permute(parts, (3, 0, 2, 5, 4, 1, 6))
    return tl.reshape(parts, (BM * BN,))


@triton.jit
def _from_line(line, BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr):
    if WIDE:
        parts = tl.reshape(line, (BN // 16, 2, BM // 16, 8, 4, 2, 2))
        parts = tl.permute(parts, (2, 5, 3, 0, 1, 4, 6))
    else:
        parts = tl.reshape(line, (BN // 16, BM // 16, 8, 4, 2, 2, 2))
        parts = tl.permute(parts, (1, 5, 2, 0, 4, 3, 6))
    return tl.reshape(parts, (BM, BN))


@triton.jit
def stream_kernel(
    a_desc, w_desc, y_ptr, yt_ptr, u_ptr, r_ptr, a_scale_ptr, w_scale_ptr, bias_ptr, mul_ptr,
    addend_ptr, gain_ptr, out_scale_ptr, partial_ptr, counter_ptr, M, M_UP, head, N, K, block,
    blocks, a_outer, a_inner, w_outer, w_inner, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, MOST: tl.constexpr,
    DEVICE: tl.constexpr, PDL: tl.constexpr, IMPRECISE: tl.constexpr, WHOLE: tl.constexpr,
    A_ROWS: tl.constexpr, W_ROWS: tl.constexpr, BIAS: tl.constexpr, MUL: tl.constexpr,
    ADD: tl.constexpr, NORM: tl.constexpr, GAIN: tl.constexpr, ACT: tl.constexpr,
    GATE: tl.constexpr, SAVE: tl.constexpr, FP8: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    """MOST: at least the parts of any tile. The other switches are those of `fused_kernel`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    CLAMP: tl.constexpr = not DEVICE
    SIZE: tl.constexpr = BM * BN
    WIDE: tl.constexpr = partial_ptr.dtype.element_ty == tl.float32
    # Read before the product: their latency would be waited for after it.
    EARLY: tl.constexpr = not (A_ROWS or W_ROWS)
    out_scale = 1.0
    if FP8:
        out_scale = 1.0 / tl.load(out_scale_ptr)
    tiles_m = tl.cdiv(M, BM)
    tiles = tiles_m * blocks
    rest = tl.cdiv(K, BK) - head
    with_owner = tl.minimum(head, 1)
    owners = tiles * with_owner
    helpers = tl.num_programs(0) - owners
    line = tiles * rest
    helper = tl.program_id(0)
    owner = helper >= helpers
    # Of the line; an owner stands where its tile does.
    low = tl.where(owner, (helper - helpers) * rest, helper * line // helpers)
    high = tl.where(owner, low + rest, (helper + 1) * line // helpers)
    for tile in range(low // rest, (high - 1) // rest + 1):
        begin = tl.where(owner, 0, head + tl.maximum(low - tile * rest, 0))
        end = tl.where(owner, head, head + tl.minimum(high - tile * rest, rest))
        # The helpers of this tile: who has its first step on the line, and who its last.
        nearest = ((tile * rest + 1) * helpers - 1) // line
        farthest = ((tile + 1) * rest * helpers - 1) // line
        parts = with_owner + farthest - nearest + 1
        index = tl.where(owner, 0, with_owner + helper - nearest)
        tile_m = tile % tiles_m
        tile_n = tile // tiles_m
        first_row = tile_m * BM
        first = tile_n * block
        rows = first_row + tl.arange(0, BM)
        if EARLY:
            a_scale = rows_of(a_scale_ptr, rows, M, A_ROWS)
            w_scale = columns_of(w_scale_ptr, first, N, block, BN, W_ROWS)
        acc = product(
            a_desc, w_desc, a_scale_ptr, w_scale_ptr, begin, end, rows, first_row, first, M, N,
            block, a_outer, a_inner, w_outer, w_inner, BM, BN, BK, IMPRECISE, A_ROWS,
        )  # fmt: skip
        # In 32 bits: there are fewer tiles than programs.
        places = partial_ptr + tile * (MOST * SIZE) + tl.arange(0, SIZE)
        seen = tl.full((), -1, tl.int32)
        if begin == 0:
            # The first part, when all others have arrived, need not be written.
            seen = tl.atomic_add(counter_ptr + tile, 0, sem="acquire")
        kept = seen == parts - 1
        acc = acc.to(partial_ptr.dtype.element_ty)
        if not kept:
            tl.store(places + index * SIZE, _to_line(acc, BM, BN, WIDE))
            # Every thread's stores, then one arrival that releases them.
            tl.debug_barrier()
            seen = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
        if seen == parts - 1:
            total = tl.where(kept, acc.to(tl.float32), 0.0)
            for part in range(kept.to(tl.int32), parts):
                # Not from L1, which may hold an earlier launch's.
                other = tl.load(places + part * SIZE, cache_modifier=".cg")
                total += _from_line(other, BM, BN, WIDE).to(tl.float32)
            tl.store(counter_ptr + tile, 0)
            if not EARLY:
                a_scale = rows_of(a_scale_ptr, rows, M, A_ROWS)
                w_scale = columns_of(w_scale_ptr, first, N, block, BN, W_ROWS)
            finish(
                total, a_scale, w_scale, out_scale, rows, first, tile_n, y_ptr, yt_ptr, u_ptr,
                r_ptr, bias_ptr, mul_ptr, addend_ptr, gain_ptr, M, M_UP, N, block, blocks, eps, BN,
                W_ROWS, WHOLE, CLAMP, BIAS, MUL, ADD, NORM, GAIN, ACT, GATE, SAVE, FP8, TRANSPOSE,
            )  # fmt: skip
