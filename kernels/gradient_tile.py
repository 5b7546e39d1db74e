"""Triton code of one tile of the chain's backward: dL/dy -> dL/dz through activation and BlockNorm.

dL/dv = dL/dy * act'(v), v = gain * u        dL/du = gain * dL/dv
dL/dz = r * (dL/du - u * mean_block(dL/du * u))
gate form, y = z * a(v):  dL/dv = dL/dy * z * a'(v), and dL/dz gains dL/dy * a(v)
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Numbers of ACT.
ACTIVATIONS = {"none": 0, "hard_swish": 1, "hard_sigmoid": 2}


@triton.jit
def gradient_of(
    gy, u, r, gain, width, ACT: tl.constexpr, GATE: tl.constexpr, GAIN: tl.constexpr
):  # fmt: skip
    """gy, u (rows, block), r (rows,), gain (block,), all FP32 -> (dL/dz, dL/dv * u)."""
    v = u
    if GAIN:
        v = u * gain[None, :]
    g = gy
    if GATE:
        g = gy * (u / r[:, None])
    if ACT == 1:
        slope = tl.where(v <= -3.0, 0.0, tl.where(v >= 3.0, 1.0, v * (1.0 / 3.0) + 0.5))
        gv = g * slope
    elif ACT == 2:
        gv = g * tl.where((v > -3.0) & (v < 3.0), 1.0 / 6.0, 0.0)
    else:
        gv = g
    for_gain = gv * u
    gu = gv
    if GAIN:
        gu = gv * gain[None, :]
    mean = tl.sum(gu * u, axis=1) / width
    gz = r[:, None] * (gu - u * mean[:, None])
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
    ACT: tl.constexpr, GATE: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """(dL/dz, dL/dv * u) of one tile, FP32, zero outside `mask`."""
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    gy = tl.load(gy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + at, mask=mask, other=0.0).to(tl.float32)
    r = tl.load(r_ptr + rows.to(tl.int64) * blocks + tile_n, mask=rows < M, other=1.0)
    gain = r
    if GAIN:
        gain = tl.load(gain_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
    gz, for_gain = gradient_of(gy, u, r, gain, width, ACT, GATE, GAIN)
    # A NaN row's mean reaches past the block; dL/dv * u is zero there as it is.
    return tl.where(mask, gz, 0.0), for_gain
