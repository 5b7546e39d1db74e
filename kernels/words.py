"""Triton pieces for results that are stored transposed: the FP8 bytes of several rows as one word.

A thread that holds rows side by side in memory of the transposed result stores them together; bytes
that are turned one by one cost more than all the rest of a memory-bound kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loka_compile.kernels.fp8 import to_fp8


@triton.jit
def word_of(a, b, c, d, like: tl.constexpr, MAX: tl.constexpr, EXACT: tl.constexpr):
    """Four FP32 tiles -> one of int32 of their bytes in FP8, `a` the lowest; see `fp8.to_fp8`."""
    if EXACT:
        word = to_fp8(a, like, MAX, EXACT).to(tl.uint8, bitcast=True).to(tl.int32)
        word |= to_fp8(b, like, MAX, EXACT).to(tl.uint8, bitcast=True).to(tl.int32) << 8
        word |= to_fp8(c, like, MAX, EXACT).to(tl.uint8, bitcast=True).to(tl.int32) << 16
        word |= to_fp8(d, like, MAX, EXACT).to(tl.uint8, bitcast=True).to(tl.int32) << 24
    else:
        # One instruction casts and packs two values; taken apart again they would cost six.
        KIND: tl.constexpr = "e4m3x2" if MAX < 1000.0 else "e5m2x2"
        CODE: tl.constexpr = (
            "{ .reg .b16 lo, hi;"
            " cvt.rn.satfinite." + KIND + ".f32 lo, $2, $1;"
            " cvt.rn.satfinite." + KIND + ".f32 hi, $4, $3;"
            " mov.b32 $0, {lo, hi}; }"
        )
        word = tl.inline_asm_elementwise(
            CODE, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
        )
    return word


@triton.jit
def pair_of(low, high):
    """Two words of int32 -> one of int64."""
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)


@triton.jit
def first_bytes(word, left, SIZE: tl.constexpr):
    """The first `left` (rows,) of the SIZE bytes of `word` (rows, ...), from none to all."""
    left = tl.minimum(tl.maximum(left, 0), SIZE).to(word.dtype)
    # A shift by a word's width is undefined.
    keep = tl.where(left == SIZE, -1, (1 << (8 * tl.minimum(left, SIZE - 1))) - 1)
    return word & (keep[:, None, None] if len(word.shape) == 3 else keep[:, None])
