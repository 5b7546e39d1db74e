"""The fused chain's Triton code: FP8 GEMM -> scales -> pointwise -> BlockNorm -> activation.

What a tile is and what is made of it: `fused_tile`. `fused_forward` is the host's side. The grid is
persistent.

Few tiles and a long K (N = 256, K = 7680 fills 16 of 132 SMs) are split along K: the programs of
one tile put partial sums into a workspace, meet at a counter, and each then reduces and finishes
its share of the rows. Where tiles fill whole waves of SMs and some are left over, only those are
split: the first `full` tiles are not. All programs of a split launch are resident at once (the
grid is at most the number of SMs) and none waits before its part is done, so waiting at the
counter cannot dead-lock. Counters only grow: a launch adds SPLIT_K to each, so nothing is reset and
CUDA-graph replay works; splits of another width have counters of their own, since a count that is
no multiple of SPLIT_K would never be met.

With PDL (programmatic dependent launch) the next kernel's programs take their places while this
one still runs, and wait for its end before they touch memory: the launch itself costs no time.
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
def fused_kernel(
    a_desc, w_desc, y_ptr, yt_ptr, u_ptr, r_ptr, a_scale_ptr, w_scale_ptr, bias_ptr, mul_ptr,
    addend_ptr, gain_ptr, out_scale_ptr, partial_ptr, counter_ptr, M, M_UP, full, N, K, block,
    blocks, a_outer, a_inner, w_outer, w_inner, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT_K: tl.constexpr,
    TAIL: tl.constexpr, DEVICE: tl.constexpr, PDL: tl.constexpr, FLATTEN: tl.constexpr,
    IMPRECISE: tl.constexpr, WHOLE: tl.constexpr,
    A_ROWS: tl.constexpr, W_ROWS: tl.constexpr, BIAS: tl.constexpr, MUL: tl.constexpr,
    ADD: tl.constexpr, NORM: tl.constexpr, GAIN: tl.constexpr, ACT: tl.constexpr,
    GATE: tl.constexpr, SAVE: tl.constexpr, FP8: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    """TAIL: `full` > 0. DEVICE: not the interpreter, whose programs run one after another.

    A_ROWS, W_ROWS: 0 one scale, 1 one per row, 2 also along K, see `product`.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tiles_m = tl.cdiv(M, BM)
    tiles = tiles_m * blocks
    steps = tl.cdiv(K, BK)
    per_split = tl.cdiv(steps, SPLIT_K)
    CLAMP: tl.constexpr = not DEVICE
    # Scales are read before the product, since their latency would be waited for after it; not
    # where an epilogue that saves tensors needs the registers.
    EARLY: tl.constexpr = SAVE == 0 or not (A_ROWS or W_ROWS)
    out_scale = 1.0
    if FP8:
        out_scale = 1.0 / tl.load(out_scale_ptr)
    # Split parts come first, one a program, and are finished last: by then the others have arrived.
    parts = 0
    if SPLIT_K > 1:
        parts = (tiles - full) * SPLIT_K
    works = parts + (full if SPLIT_K > 1 else tiles)
    seen = 0
    for work in tl.range(tl.program_id(0), works, tl.num_programs(0), flatten=FLATTEN):
        whole = work >= parts
        tile = work - parts
        begin = 0
        end = steps
        if SPLIT_K > 1:
            split = work % SPLIT_K
            tile = tl.where(whole, tile, full + work // SPLIT_K)
            begin = tl.where(whole, 0, split * per_split)
            end = tl.where(whole, steps, tl.minimum(begin + per_split, steps))
        # Down the rows first: neighbours in time share the weight's tile in L2.
        tile_m = tile % tiles_m
        tile_n = tile // tiles_m
        first_row = tile_m * BM
        first = tile_n * block
        rows = first_row + tl.arange(0, BM)
        if EARLY:
            w_scale = columns_of(w_scale_ptr, first, N, block, BN, W_ROWS)
            a_scale = rows_of(a_scale_ptr, rows, M, A_ROWS)
        acc = product(
            a_desc, w_desc, a_scale_ptr, w_scale_ptr, begin, end, rows, first_row, first, M, N,
            block, a_outer, a_inner, w_outer, w_inner, BM, BN, BK, IMPRECISE, A_ROWS,
        )  # fmt: skip
        if SPLIT_K == 1 or (TAIL and whole):
            if not EARLY:
                w_scale = columns_of(w_scale_ptr, first, N, block, BN, W_ROWS)
                a_scale = rows_of(a_scale_ptr, rows, M, A_ROWS)
            finish(
                acc, a_scale, w_scale, out_scale, rows, first, tile_n,
                y_ptr, yt_ptr, u_ptr, r_ptr, bias_ptr, mul_ptr, addend_ptr, gain_ptr, M, M_UP, N,
                block, blocks, eps, BN, W_ROWS, WHOLE, CLAMP, BIAS, MUL, ADD, NORM, GAIN, ACT, GATE,
                SAVE, FP8, TRANSPOSE,
            )  # fmt: skip
        else:
            base = partial_ptr + (tile - full).to(tl.int64) * (SPLIT_K * BM * BN)
            at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
            tl.store(base + split * (BM * BN) + at, acc.to(partial_ptr.dtype.element_ty))
            # Every thread's stores, then one arrival that releases them.
            tl.debug_barrier()
            seen = tl.atomic_add(counter_ptr + (tile - full), 1, sem="acq_rel")
    if SPLIT_K > 1:
        part = tl.program_id(0)
        # The interpreter's programs cannot wait: the last to arrive finishes the whole tile.
        SHARE: tl.constexpr = BM // SPLIT_K if DEVICE else BM
        ready = part < parts
        index = part // SPLIT_K
        if DEVICE:
            if ready:
                target = (seen // SPLIT_K + 1) * SPLIT_K
                # The last to arrive, whom all wait for, asks no more: its own arrival told it.
                count = seen + 1
                while count < target:
                    count = tl.atomic_add(counter_ptr + index, 0, sem="acquire")
                tl.debug_barrier()
        else:
            ready = ready & (seen % SPLIT_K == SPLIT_K - 1)
        if ready:
            tile = full + index
            first = (tile // tiles_m) * block
            local = (part % SPLIT_K if DEVICE else 0) * SHARE + tl.arange(0, SHARE)
            rows = (tile % tiles_m) * BM + local
            at = partial_ptr + index.to(tl.int64) * (SPLIT_K * BM * BN)
            at += local[:, None] * BN + tl.arange(0, BN)[None, :]
            total = tl.zeros((SHARE, BN), dtype=tl.float32)
            for other in tl.static_range(SPLIT_K):
                total += tl.load(at + other * (BM * BN)).to(tl.float32)
            finish(
                total, rows_of(a_scale_ptr, rows, M, A_ROWS),
                columns_of(w_scale_ptr, first, N, block, BN, W_ROWS), out_scale, rows, first,
                tile // tiles_m, y_ptr, yt_ptr, u_ptr, r_ptr, bias_ptr, mul_ptr, addend_ptr,
                gain_ptr, M, M_UP, N, block, blocks, eps, BN, W_ROWS, WHOLE, CLAMP, BIAS, MUL, ADD,
                NORM, GAIN, ACT, GATE, SAVE, FP8, TRANSPOSE,
            )  # fmt: skip
