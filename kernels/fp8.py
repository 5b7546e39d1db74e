"""Triton pieces that every FP8 kernel shares: amax bits, power-of-two scales, the guarded cast."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Values of `like`.
LIKE = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def magnitude(x):
    """|x| of FP32 as an integer: the order of non-negative floats, with NaN above inf."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def larger_magnitude(bits, x, EXACT: tl.constexpr):
    """The larger of a `magnitude` and that of x, as one instruction."""
    if EXACT:
        bits = tl.maximum(bits, magnitude(x))
    else:
        bits = tl.inline_asm_elementwise(
            "{ .reg .f32 a; abs.f32 a, $2; max.NaN.f32 $0, $1, a; }", "=f,f,f",
            [bits.to(tl.float32, bitcast=True), x], dtype=tl.float32, is_pure=True, pack=1,
        ).to(tl.int32, bitcast=True)  # fmt: skip
    return bits


@triton.jit
def power_of_two(bits, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """As kernels.quantize.power_of_two_scale: amax bits -> (scale, 1 / scale)."""
    biased = ((bits + (0x7FFFFF - MANTISSA)) >> 23) - EXPONENT
    biased = tl.minimum(tl.maximum(biased, 1), 253)
    finite = bits < 0x7F800000
    nan = float("nan")
    scale = tl.where(finite, (biased << 23).to(tl.float32, bitcast=True), nan)
    inverse = tl.where(finite, ((254 - biased) << 23).to(tl.float32, bitcast=True), nan)
    return scale, inverse


@triton.jit
def apart(bits, zero):
    """`bits` as a value of its own; `zero` is an argument of the kernel that is 0 at run time.

    Triton 3.6 mixes up the elements of an FP8 tile that is stored both as it lies and transposed.
    Casting the transposed tile again avoids that only while a compiler cannot tell that the two
    casts are one: under the same scale it would merge them.
    """
    return bits + zero


@triton.jit
def to_fp8(v, like: tl.constexpr, MAX: tl.constexpr, EXACT: tl.constexpr):
    """FP32 -> FP8 (`like`: e4m3fn or e5m2), clamped; NaN stays NaN. The hardware's cast saturates.

    EXACT rounds to nearest even by integer arithmetic, byte for byte what the hardware's cast
    gives: Triton's interpreter truncates instead, and makes a number of an e4m3 NaN.
    """
    if EXACT:
        v = tl.clamp(v, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
        # e4m3: 3 mantissa bits, bias 7; e5m2: 2 and 15.
        SHORT: tl.constexpr = MAX < 1000.0
        BITS: tl.constexpr = 3 if SHORT else 2
        BIAS: tl.constexpr = 7 if SHORT else 15
        DROP: tl.constexpr = 23 - BITS
        a = magnitude(v)
        sign = (v.to(tl.int32, bitcast=True) >> 24) & 0x80
        half = (1 << (DROP - 1)) - 1 + ((a >> DROP) & 1)
        normal = ((a + half) >> DROP) - ((127 - BIAS) << BITS)
        # Below the smallest normal number: adding this one leaves the step's count in the mantissa.
        MAGIC: tl.constexpr = (127 + 1 - BIAS + 23 - BITS) << 23
        few = a.to(tl.float32, bitcast=True) + tl.full(a.shape, MAGIC, tl.int32).to(
            tl.float32, bitcast=True
        )
        subnormal = few.to(tl.int32, bitcast=True) - MAGIC
        byte = tl.where(a < ((128 - BIAS) << 23), subnormal, normal)
        byte = tl.where(a > 0x7F800000, 0x7F, byte) | sign
        q = byte.to(tl.uint8).to(like, bitcast=True)
    else:
        q = v.to(like)
    return q


@triton.jit
def to_bf16(x, EXACT: tl.constexpr):
    """FP32 -> the nearest bf16 value, in FP32; EXACT as in `to_fp8`."""
    if EXACT:
        bits = x.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        near = tl.where(magnitude(x) > 0x7F800000, bits, near)
        x = near.to(tl.float32, bitcast=True)
    else:
        x = x.to(tl.bfloat16).to(tl.float32)
    return x
