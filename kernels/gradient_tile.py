"""Triton code of one tile of the chain's backward: dL/dy -> dL/dz through activation and BlockNorm.

dL/dv = dL/dy * act'(v), v = gain * u        dL/du = gain * dL/dv
dL/dz = r * (dL/du - u * mean_block(dL/du * u))
gate form, y = z * a(v):  dL/dv = dL/dy * z * a'(v), and dL/dz gains dL/dy * a(v)
"""

from __future__ import annotations

import triton
import triton.language as tl

from loka_compile.kernels.pairs import wide_of

#: Numbers of ACT.
ACTIVATIONS = {"none": 0, "hard_swish": 1, "hard_sigmoid": 2}


@triton.jit
def _swish_slope(v, EXACT: tl.constexpr):
    """Of Hard Swish, at v in FP32; NaN gives zero."""
    if EXACT:
        end = tl.minimum(tl.maximum(v, 0.0), 1.0)
        slope = tl.where(tl.abs(v) < 3.0, v * (1.0 / 3.0) + 0.5, end)
    else:
        # Past +-3 the slope is v clamped to 0..1.
        CODE: tl.constexpr = (
            "{ .reg .pred p; .reg .f32 a; abs.f32 a, $1; setp.lt.f32 p, a, 0f40400000;"
            " fma.rn.f32 $0, $1, 0f3EAAAAAB, 0f3F000000;"
            " @!p add.sat.f32 $0, $1, 0f00000000; }"
        )
        slope = tl.inline_asm_elementwise(
            CODE, "=&f,f", [v], dtype=tl.float32, is_pure=True, pack=1
        )
    return slope


@triton.jit
def _with_swish_slope(u, EXACT: tl.constexpr):
    """u as stored -> (u, slope of Hard Swish at u), both in FP32."""
    if EXACT or u.dtype != tl.bfloat16:
        wide = u.to(tl.float32)
        slope = _swish_slope(wide, EXACT)
    else:
        # As above, of a pair: both are compared at once.
        CODE: tl.constexpr = (
            "{ .reg .pred p, q; .reg .b32 a, b; abs.bf16x2 a, $4; mov.b32 b, 0x40404040;"
            " setp.lt.bf16x2 p|q, a, b; shl.b32 $0, $4, 16; and.b32 $1, $4, 0xffff0000;"
            " fma.rn.f32 $2, $0, 0f3EAAAAAB, 0f3F000000;"
            " fma.rn.f32 $3, $1, 0f3EAAAAAB, 0f3F000000;"
            " @!p add.sat.f32 $2, $0, 0f00000000; @!q add.sat.f32 $3, $1, 0f00000000; }"
        )
        wide, slope = tl.inline_asm_elementwise(
            CODE, "=&f,=&f,=&f,=&f,r", [u], dtype=(tl.float32, tl.float32), is_pure=True, pack=2
        )
    return wide, slope


@triton.jit
def _mean(x, width):
    """Of each row of x (rows, block) or (rows, groups, group), zeros past `width`."""
    if len(x.shape) == 3:
        flat = tl.reshape(x, (x.shape[0], x.shape[1] * x.shape[2]))
        mean = (tl.sum(flat, axis=1) / width)[:, None, None]
    else:
        mean = (tl.sum(x, axis=1) / width)[:, None]
    return mean


@triton.jit
def gradient_of(
    gy, u, r, gain, width, ACT: tl.constexpr, GATE: tl.constexpr, GAIN: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """gy, u (rows, block) or (rows, groups, group) as stored, r (rows, 1[, 1]) and gain, that goes
    with a row, in FP32 -> (dL/dz, dL/dv * u) in FP32."""
    gy = wide_of(gy, EXACT)
    slope = 1.0
    if ACT == 1 and not GAIN:
        u, slope = _with_swish_slope(u, EXACT)
    else:
        u = wide_of(u, EXACT)
    v = u
    if GAIN:
        v = u * gain
    g = gy
    if GATE:
        g = gy * (u / r)
    if ACT == 1:
        if GAIN:
            slope = _swish_slope(v, EXACT)
        gv = g * slope
    elif ACT == 2:
        gv = g * tl.where((v > -3.0) & (v < 3.0), 1.0 / 6.0, 0.0)
    else:
        gv = g
    for_gain = gv * u
    gu = gv
    if GAIN:
        gu = gv * gain
    gz = r * (gu - u * _mean(gu * u, width))
    if GATE:
        if ACT == 1:
            gz += gy * (v * tl.minimum(tl.maximum(v + 3.0, 0.0), 6.0) * (1.0 / 6.0))
        elif ACT == 2:
            gz += gy * (tl.minimum(tl.maximum(v + 3.0, 0.0), 6.0) * (1.0 / 6.0))
        else:
            gz += gy * v
    return gz, for_gain


@triton.jit
def read_rows(gy_ptr, u_ptr, r_ptr, rows, inside, M, wanted, WHOLE: tl.constexpr):
    """dL/dy, u (rows, block) and r (rows,) as they are stored, from pointers of these shapes; zero
    (r: one) where a row is past M, a column not `inside`, or nothing `wanted`. WHOLE: only `wanted`
    masks."""
    if WHOLE:
        gy = tl.load(gy_ptr, mask=wanted, other=0.0, eviction_policy="evict_first")
        u = tl.load(u_ptr, mask=wanted, other=0.0, eviction_policy="evict_first")
        r = tl.load(r_ptr, mask=wanted, other=1.0)
    else:
        here = (rows < M) & wanted
        mask = here[:, None] & inside[None, :]
        gy = tl.load(gy_ptr, mask=mask, other=0.0, eviction_policy="evict_first")
        u = tl.load(u_ptr, mask=mask, other=0.0, eviction_policy="evict_first")
        r = tl.load(r_ptr, mask=here, other=1.0)
    return gy, u, r


@triton.jit
def gradient_tile(
    gy_ptr, u_ptr, r_ptr, gain_ptr, rows, columns, mask, tile_n, M, N, blocks, width,
    ACT: tl.constexpr, GATE: tl.constexpr, GAIN: tl.constexpr, WHOLE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """(dL/dz, dL/dv * u) of one tile, FP32, zero outside `mask`. WHOLE: all is inside."""
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    r_ptr += rows.to(tl.int64) * blocks + tile_n
    if WHOLE:
        gy, u, r = tl.load(gy_ptr + at), tl.load(u_ptr + at), tl.load(r_ptr)[:, None]
    else:
        gy = tl.load(gy_ptr + at, mask=mask, other=0.0)
        u = tl.load(u_ptr + at, mask=mask, other=0.0)
        r = tl.load(r_ptr, mask=rows < M, other=1.0)[:, None]
    gain = r
    if GAIN:
        gain = tl.load(gain_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    gz, for_gain = gradient_of(gy, u, r, gain, width, ACT, GATE, GAIN, EXACT)
    if not WHOLE:
        # A NaN row's mean reaches past the block; dL/dv * u is zero there as it is.
        gz = tl.where(mask, gz, 0.0)
    return gz, for_gain
