"""Two kernels for what a factorisation machine and a linear compression read of one x (B, n, d).

    t = x^T p      fm = x t      c = l x          p (n, k), l (m, n), per sample
    gt = x^T gfm   gx = gfm t^T + p gt^T + l^T gc
    gp = sum over samples of x gt                  gl = sum over samples of gc x^T

As separate batched products these are bound by memory: x is read three times each way, and three
partial gradients of its size are written and added up. A sample's x fits into one program's shared
memory, so here it is read once each way and its gradient written once.

The plain-torch forms are `lowering.interaction.interaction_ref` and `interaction_backward_ref`.
t and gt are rounded to x's dtype in between, as separate products round them; the sums over samples
stay in FP32 to the end, per program, and are added up outside in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import aligned
from loka_compile.kernels.launch import empty
from loka_compile.kernels.launch import kind
from loka_compile.kernels.tiles import programs_of


@triton.jit
def _tile(ptr, rows, columns, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(rows, columns) of a matrix, zero outside ROWS x COLUMNS."""
    at = rows[:, None] * row_stride + columns[None, :] * column_stride
    return tl.load(ptr + at, mask=(rows < ROWS)[:, None] & (columns < COLUMNS)[None, :], other=0.0)


@triton.jit
def _put(ptr, tile, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    at = rows[:, None] * COLUMNS + columns[None, :]
    tl.store(ptr + at, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _forward_kernel(
    x_ptr, p_ptr, l_ptr, fm_ptr, c_ptr, B, p_row, p_column, l_row, l_column,
    N: tl.constexpr, D: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
    NN: tl.constexpr, DD: tl.constexpr, KK: tl.constexpr, MM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, NN)
    d = tl.arange(0, DD)
    k = tl.arange(0, KK)
    m = tl.arange(0, MM)
    p = _tile(p_ptr, n, k, p_row, p_column, N, K)
    if M > 0:
        left = _tile(l_ptr, m, n, l_row, l_column, M, N)
    for b in tl.range(tl.program_id(0), B, tl.num_programs(0), num_stages=STAGES):
        sample = b + tl.full((), 0, tl.int64)  # 64-bit offsets
        x = _tile(x_ptr + sample * (N * D), n, d, D, 1, N, D)
        t = tl.dot(tl.trans(x), p).to(x.dtype)
        _put(fm_ptr + sample * (N * K), tl.dot(x, t), n, k, N, K)
        if M > 0:
            _put(c_ptr + sample * (M * D), tl.dot(left, x), m, d, M, D)


@triton.jit
def _backward_kernel(
    x_ptr, p_ptr, l_ptr, gfm_ptr, gc_ptr, gx_ptr, gp_ptr, gl_ptr, B, gc_sample, p_row, p_column,
    l_row, l_column,
    N: tl.constexpr, D: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
    NN: tl.constexpr, DD: tl.constexpr, KK: tl.constexpr, MM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, NN)
    d = tl.arange(0, DD)
    k = tl.arange(0, KK)
    m = tl.arange(0, MM)
    p = _tile(p_ptr, n, k, p_row, p_column, N, K)
    gp = tl.zeros((NN, KK), dtype=tl.float32)
    if M > 0:
        turned = _tile(l_ptr, n, m, l_column, l_row, N, M)
        gl = tl.zeros((MM, NN), dtype=tl.float32)
    for b in tl.range(tl.program_id(0), B, tl.num_programs(0), num_stages=STAGES):
        sample = b + tl.full((), 0, tl.int64)  # 64-bit offsets
        x = _tile(x_ptr + sample * (N * D), n, d, D, 1, N, D)
        gfm = _tile(gfm_ptr + sample * (N * K), n, k, K, 1, N, K)
        t = tl.dot(tl.trans(x), p).to(x.dtype)
        gt = tl.dot(tl.trans(x), gfm).to(x.dtype)
        gx = tl.dot(gfm, tl.trans(t))
        gx = tl.dot(p, tl.trans(gt), gx)
        gp = tl.dot(x, gt, gp)
        if M > 0:
            gc = _tile(gc_ptr + sample * gc_sample, m, d, D, 1, M, D)
            gx = tl.dot(turned, gc, gx)
            gl = tl.dot(gc, tl.trans(x), gl)
        _put(gx_ptr + sample * (N * D), gx, n, d, N, D)
    program = tl.program_id(0).to(tl.int64)
    _put(gp_ptr + program * (N * K), gp, n, k, N, K)
    if M > 0:
        _put(gl_ptr + program * (M * N), gl, m, n, M, N)


_launch_forward = Launcher(_forward_kernel)
_launch_backward = Launcher(_backward_kernel)


def _sizes(x: Tensor, p: Tensor, left: Tensor | None) -> dict[str, int]:
    (n, d), k = x.shape[1:], p.shape[1]
    m = 0 if left is None else left.shape[0]
    sizes = {"N": n, "D": d, "K": k, "M": m}
    return sizes | {2 * s: max(16, triton.next_power_of_2(v)) for s, v in sizes.items()}


def _strides(p: Tensor, left: Tensor | None) -> tuple[int, int, int, int]:
    other = p if left is None else left
    return p.stride(0), p.stride(1), other.stride(0), other.stride(1)


def interaction(
    x: Tensor,
    p: Tensor,
    left: Tensor | None,
    *,
    programs: int = 1,
    warps: int = 8,
    stages: int = 3,
) -> tuple[Tensor, Tensor]:
    """x (B, n, d) contiguous, p (n, k), left (m, n) or None, any strides, bf16 or fp16 ->
    fm (B, n, k) = x (x^T p), c (B, m, d) = left x (empty without `left`), in x's dtype.

    `programs` per SM and the rest as measured on an H200 (bench_interaction --sweep). Error against
    FP64: the rounding of x's dtype, of t and of the results.
    """
    batch = x.shape[0]
    sizes = _sizes(x, p, left)
    fm = empty((batch, sizes["N"], sizes["K"]), x.dtype, x.device)
    shape = (batch, sizes["M"], sizes["D"]) if left is not None else (0,)
    c = empty(shape, x.dtype, x.device)
    if batch == 0:
        return fm, c
    by = p if left is None else left
    args = (x, p, by, fm, c if left is not None else fm, batch, *_strides(p, left))
    constants = {**sizes, "STAGES": stages}
    key = _key(x, args, constants, warps, aligned(x, p, by))
    grid = (min(batch, programs * programs_of(x.device)),)
    _launch_forward(key, grid, args, constants, x.device, num_warps=warps, num_stages=stages)
    return fm, c


def interaction_backward(
    gfm: Tensor,
    gc: Tensor | None,
    x: Tensor,
    p: Tensor,
    left: Tensor | None,
    *,
    programs: int = 1,
    warps: int = 8,
    stages: int = 3,
) -> tuple[Tensor, Tensor, Tensor]:
    """gfm (B, n, k), gc (B, m, d), x (B, n, d), contiguous -> gx (B, n, d), gp (n, k), gl (m, n),
    in the dtypes of x, p, left; gl is empty without `left`.

    The samples of gc may lie apart, as they do in a slice of what a `cat` had joined."""
    batch = x.shape[0]
    sizes = _sizes(x, p, left)
    n, k, m = sizes["N"], sizes["K"], sizes["M"]
    gx = empty(x.shape, x.dtype, x.device)
    count = min(batch, programs * programs_of(x.device))
    partial_p = empty((count, n, k), torch.float32, x.device)
    partial_l = empty((count, m, n), torch.float32, x.device)
    if batch:
        by = p if left is None else left
        args = (
            x, p, by, gfm, gc if gc is not None else gfm, gx, partial_p, partial_l, batch,
            0 if gc is None else gc.stride(0), *_strides(p, left),
        )  # fmt: skip
        constants = {**sizes, "STAGES": stages}
        key = _key(x, args, constants, warps, aligned(x, p, by, gfm, gc))
        _launch_backward(
            key, (count,), args, constants, x.device, num_warps=warps, num_stages=stages
        )
    gp = partial_p.sum(0).to(p.dtype)
    gl = empty((0,), x.dtype, x.device) if left is None else partial_l.sum(0).to(left.dtype)
    return gx, gp, gl


def _key(x: Tensor, args: tuple, constants: dict[str, int], warps: int, even: bool) -> tuple:
    sizes = tuple(a for a in args if isinstance(a, int))
    return (x.dtype, kind(*sizes), tuple(constants.values()), warps, even, x.device.index)
