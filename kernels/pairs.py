"""Triton pieces for bf16 in pairs: two values in a word of int32, one instruction for both.

A kernel that reads and writes each value once is soon bound by what it issues per value, not by
memory. Each piece has a plain form (EXACT) for Triton's interpreter, which gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loka_compile.kernels.fp8 import to_bf16
from loka_compile.kernels.words import word_of


@triton.jit
def wide_of(x, EXACT: tl.constexpr):
    """As FP32. Of bf16 both of a pair at once: Triton takes two steps for the upper one."""
    if EXACT or x.dtype != tl.bfloat16:
        wide = x.to(tl.float32)
    else:
        bits = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [x], dtype=tl.int32,
            is_pure=True, pack=2,
        )  # fmt: skip
        wide = bits.to(tl.float32, bitcast=True)
    return wide


@triton.jit
def rounded_pair(low, high, EXACT: tl.constexpr):
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
def _larger_exact(a, b):
    return tl.maximum(a & 0x7FFF, b & 0x7FFF) | tl.maximum(a & 0x7FFF0000, b & 0x7FFF0000)


@triton.jit
def _larger(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def larger_pair(a, b, EXACT: tl.constexpr):
    """Two pairs -> the pair of larger magnitudes, NaN above all; signs are of no meaning."""
    return _larger_exact(a, b) if EXACT else _larger(a, b)


@triton.jit
def largest_pair(pairs, axis: tl.constexpr, EXACT: tl.constexpr):
    """`larger_pair` of all along `axis`."""
    if EXACT:
        most = tl.max(pairs & 0x7FFF, axis) | tl.max(pairs & 0x7FFF0000, axis)
    else:
        most = tl.reduce(pairs, axis, _larger)
    return most


@triton.jit
def _inverse_pair(most, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, EXACT: tl.constexpr):
    """A pair of magnitudes -> the inverse scales of both, in bf16, as if all were finite."""
    # Both halves at once: no carry leaves the lower one. No amax needs more than 2**253.
    UP: tl.constexpr = (0x7F - (MANTISSA >> 16)) * 0x10001
    LEAST: tl.constexpr = ((EXPONENT + 1) << 7) * 0x10001
    FROM: tl.constexpr = ((254 + EXPONENT) << 7) * 0x10001 - (1 << 32)
    power = (most + UP) & 0x7F807F80
    if EXACT:
        power = _larger_exact(power, tl.full(power.shape, LEAST, tl.int32))
    else:
        power = tl.inline_asm_elementwise(
            "max.u16x2 $0, $1, $2;", "=r,r,r", [power, tl.full(power.shape, LEAST, tl.int32)],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return FROM - power


@triton.jit
def inverse_scales(most, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, EXACT: tl.constexpr):
    """A pair of amax -> the inverse scales of both, in FP32, as `fp8.power_of_two` gives them."""
    most &= 0x7FFF7FFF
    inverse = _inverse_pair(most, EXPONENT, MANTISSA, EXACT)
    low = tl.where((most & 0xFFFF) < 0x7F80, inverse << 16, 0x7FC00000)
    high = tl.where(most < 0x7F800000, inverse & -0x10000, 0x7FC00000)
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def inverse_scale_pair(most, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, EXACT: tl.constexpr):
    """The same of the larger of each pair, in bf16 and in both halves."""
    turned = (most << 16) | ((most >> 16) & 0xFFFF)
    most = larger_pair(most, turned, EXACT) & 0x7FFF7FFF
    inverse = _inverse_pair(most, EXPONENT, MANTISSA, EXACT)
    return tl.where(most < 0x7F800000, inverse, 0x7FC07FC0)


@triton.jit
def word_of_pairs(ab, cd, by, like: tl.constexpr, MAX: tl.constexpr, EXACT: tl.constexpr):
    """Two pairs times `by`, a pair of one power of two -> a word of four FP8, `a` the lowest."""
    if EXACT:
        one = (by & -0x10000).to(tl.float32, bitcast=True)
        a = (ab << 16).to(tl.float32, bitcast=True) * one
        b = (ab & -0x10000).to(tl.float32, bitcast=True) * one
        c = (cd << 16).to(tl.float32, bitcast=True) * one
        d = (cd & -0x10000).to(tl.float32, bitcast=True) * one
        word = word_of(a, b, c, d, like, MAX, EXACT)
    else:
        # A power of two multiplies bf16 exactly; what underflows is zero in FP8, too.
        KIND: tl.constexpr = "e4m3x2" if MAX < 1000.0 else "e5m2x2"
        CODE: tl.constexpr = (
            "{ .reg .b16 lo, hi; .reg .b32 x, y, p, q, r, s;"
            " mul.bf16x2 x, $1, $3; mul.bf16x2 y, $2, $3;"
            " shl.b32 p, x, 16; and.b32 q, x, 0xffff0000;"
            " shl.b32 r, y, 16; and.b32 s, y, 0xffff0000;"
            " cvt.rn.satfinite." + KIND + ".f32 lo, q, p;"
            " cvt.rn.satfinite." + KIND + ".f32 hi, s, r;"
            " mov.b32 $0, {lo, hi}; }"
        )
        word = tl.inline_asm_elementwise(
            CODE, "=r,r,r,r", [ab, cd, by], dtype=tl.int32, is_pure=True, pack=1
        )
    return word
