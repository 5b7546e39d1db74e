"""Triton code of one tile of the fused chain: its product along K, and its epilogue.

    t = (a * a_scale) @ (w * w_scale).T + bias          p = t * mul + addend
    u = p * r,  r = rsqrt(mean_block(p**2) + eps)       y = act(gain * u)  or  p * act(gain * u)

Every step but the product is a compile-time switch. A tile spans one block of features, so
BlockNorm's statistics never leave the registers; a block whose width is no power of two runs as a
masked tile. Operands come through tensor descriptors (TMA), which zero-fill tails in M and K.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Numbers of ACT.
ACTIVATIONS = {
    "none": 0,
    "hard_swish": 1,
    "hard_sigmoid": 2,
    "relu": 3,
    "silu": 4,
    "sigmoid": 5,
    "gelu": 6,
}


@triton.jit
def _activate(v, ACT: tl.constexpr):
    if ACT == 1:
        # One multiply-add and one product; what `hard_swish` says, rounded once less.
        v = v * tl.minimum(tl.maximum(v * (1.0 / 6.0) + 0.5, 0.0), 1.0)
    elif ACT == 2:
        # NaN passes: a non-finite row must stay visible.
        v = tl.clamp(v + 3.0, 0.0, 6.0, propagate_nan=tl.PropagateNan.ALL) * (1.0 / 6.0)
    elif ACT == 3:
        v = tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == 4:
        v = v / (1.0 + tl.exp(-v))
    elif ACT == 5:
        v = 1.0 / (1.0 + tl.exp(-v))
    elif ACT == 6:
        v = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    return v


@triton.jit
def rows_of(scale_ptr, rows, M, ROWS: tl.constexpr):
    """Multipliers of A for the whole product: one per row, or one for all; 1 for groups."""
    if ROWS == 0:
        scale = tl.load(scale_ptr)
    elif ROWS == 1:
        scale = tl.load(scale_ptr + rows, mask=rows < M, other=0.0)[:, None]
    else:
        scale = 1.0
    return scale


@triton.jit
def columns_of(scale_ptr, first, N, block, BN: tl.constexpr, ROWS: tl.constexpr):
    """Multipliers of W, by W's rows: the columns of the result."""
    if ROWS == 0:
        scale = tl.load(scale_ptr)
    elif ROWS == 1:
        local = tl.arange(0, BN)
        inside = (local < block) & (first + local < N)
        scale = tl.load(scale_ptr + first + local, mask=inside, other=0.0)[None, :]
    else:
        scale = 1.0
    return scale


@triton.jit
def _save(u, r, u_ptr, r_ptr, at, mask, rows, row_ok, blocks, tile_n):
    tl.store(u_ptr + at, u.to(u_ptr.dtype.element_ty), mask=mask)
    tl.store(r_ptr + (rows.to(tl.int64) * blocks + tile_n)[:, None], r, mask=row_ok[:, None])


@triton.jit
def finish(
    acc, a_scale, w_scale, out_scale, rows, first, tile_n,
    y_ptr, yt_ptr, u_ptr, r_ptr, bias_ptr, mul_ptr, addend_ptr, gain_ptr, M, M_UP, N, block, blocks,
    eps,
    BN: tl.constexpr, W_ROWS: tl.constexpr, WHOLE: tl.constexpr, CLAMP: tl.constexpr,
    BIAS: tl.constexpr, MUL: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
    GAIN: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr, SAVE: tl.constexpr,
    FP8: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    """Epilogue of `acc` (rows, BN).

    WHOLE: every block is BN wide, so no column is masked. MUL: 1 by element, 2 one scalar. SAVE: 1
    keeps u and r, 2 keeps t. CLAMP: the cast to FP8 does not saturate by itself.
    """
    local = tl.arange(0, BN)
    columns = first + local
    inside = tl.full((BN,), True, tl.int1) if WHOLE else (local < block) & (columns < N)
    row_ok = rows < M
    # Where the normalised value alone is wanted, a scale per row is part of a row's factor.
    FOLD: tl.constexpr = NORM and not (GATE or BIAS or MUL > 0 or ADD or SAVE == 2)
    if W_ROWS == 1:
        acc = acc * w_scale
        scale = a_scale
    else:
        scale = a_scale * w_scale
    if not FOLD:
        acc = acc * scale
    # 64-bit offsets: M * N passes 2**31 for real batches.
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    mask = row_ok[:, None] & inside[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SAVE == 2:
        tl.store(u_ptr + at, acc.to(u_ptr.dtype.element_ty), mask=mask)
    if MUL == 1:
        acc = acc * tl.load(mul_ptr + at, mask=mask, other=0.0).to(tl.float32)
    elif MUL == 2:
        acc = acc * tl.load(mul_ptr).to(tl.float32)
    if ADD:
        acc += tl.load(addend_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if WHOLE:
        z = acc
        width = 1.0 * BN
    else:
        # A tile may reach into its neighbour's columns: they are not this block's.
        z = tl.where(inside[None, :], acc, 0.0)
        width = tl.minimum(block, N - first).to(tl.float32)
    if FOLD:
        mean = tl.sum(z * z, axis=1, keep_dims=True) / width * scale * scale
        r = tl.rsqrt(mean + eps)
        u = z * (scale * r)
    elif NORM:
        r = tl.rsqrt(tl.sum(z * z, axis=1, keep_dims=True) / width + eps)
        u = z * r
    else:
        r = tl.full((z.shape[0], 1), 1.0, dtype=tl.float32)
        u = z
    if SAVE == 1 and not GATE:
        # Before y is made, where it is made of u alone: the registers do not hold both.
        _save(u, r, u_ptr, r_ptr, at, mask, rows, row_ok, blocks, tile_n)
    v = u
    if GAIN:
        v = v * tl.load(gain_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    y = _activate(v, ACT)
    if GATE:
        y = y * z
    if FP8:
        y = y * out_scale
        if CLAMP:
            # NaN passes the clamp: a non-finite row must stay visible.
            y = tl.clamp(y, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    if TRANSPOSE:
        # Rows past M belong to the zero-filled tail: those of this tile are written here.
        turned = columns.to(tl.int64)[:, None] * M_UP + rows[None, :]
        tail = inside[:, None] & (rows < M_UP)[None, :]
        # Transposed before it is rounded: Triton 3.6 mixes up the elements of an FP8 tile that is
        # stored both as it lies and transposed.
        t = tl.where(row_ok[None, :], tl.trans(y), 0.0).to(yt_ptr.dtype.element_ty)
        tl.store(yt_ptr + turned, t, mask=tail)
    if SAVE == 1 and GATE:
        _save(u, r, u_ptr, r_ptr, at, mask, rows, row_ok, blocks, tile_n)


@triton.jit
def product(
    a_desc, w_desc, a_scale_ptr, w_scale_ptr, begin, end, rows, first_row, first, M, N, block,
    a_outer, a_inner, w_outer, w_inner,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IMPRECISE: tl.constexpr,
    A_ROWS: tl.constexpr,
):  # fmt: skip
    """The tile (BM, BN) of A @ W.T over the steps of K from `begin` to before `end`.

    A_ROWS 2: a scale per row and step of 128 along K, at strides `a_outer` and `a_inner`, and per
    128 columns of the result and step. Those are applied to the sums of each step.
    """
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(begin, end):
        a = a_desc.load([first_row, step * BK])
        w = w_desc.load([first, step * BK])
        if A_ROWS == 2:
            local = tl.arange(0, BN)
            at = a_scale_ptr + rows.to(tl.int64) * a_outer + step * a_inner
            near = tl.load(at, mask=rows < M, other=0.0)
            at = w_scale_ptr + ((first + local) // 128).to(tl.int64) * w_outer + step * w_inner
            far = tl.load(at, mask=(local < block) & (first + local < N), other=0.0)
            acc += tl.dot(a, w.T) * near[:, None] * far[None, :]
        elif IMPRECISE:
            acc = tl.dot(a, w.T, acc)
        else:
            acc = tl.dot(a, w.T, acc, max_num_imprecise_acc=BK)
    return acc
