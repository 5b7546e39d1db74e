"""Two kernels: dL/dy -> dL/dz through activation and BlockNorm, quantised in both orientations.

    dL/dv = dL/dy * act'(v), v = gain * u        dL/du = gain * dL/dv
    dL/dz = r * (dL/du - u * mean_block(dL/du * u))
    gate form, y = z * a(v):  dL/dv = dL/dy * z * a'(v), and dL/dz gains dL/dy * a(v)
    dL/dgain = sum over rows of dL/dv * u

The first kernel finds the amax that the scales need, per row, per column or of the whole; the
second computes the gradient again and writes it as FP8, row-major for dgrad and transposed for
wgrad. What the second reads mostly lies in L2 by then, and the bf16 gradient is never written.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents
from triton.language.extra.cuda import gdc_wait

from loka_compile.kernels import block_norm as bn
from loka_compile.kernels.fp8 import magnitude
from loka_compile.kernels.fp8 import power_of_two
from loka_compile.kernels.gradient_tile import ACTIVATIONS
from loka_compile.kernels.gradient_tile import gradient_tile
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import Recipes
from loka_compile.kernels.launch import aligned
from loka_compile.kernels.launch import kind
from loka_compile.kernels.launch import overlaps
from loka_compile.kernels.launch import start
from loka_compile.kernels.quantize import FP8_MAX
from loka_compile.kernels.quantize import exponent_split


@triton.jit
def _amax_kernel(
    gy_ptr, u_ptr, r_ptr, gain_ptr, row_ptr, column_ptr, partial_ptr, M, N, block, blocks,
    BM: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr,
    GAIN: tl.constexpr, ROWS: tl.constexpr, ROWS_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile_n = tl.program_id(0)
    first = tile_n * block
    local = tl.arange(0, BN)
    columns = first + local
    inside = (local < block) & (columns < N)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    mask = (rows < M)[:, None] & inside[None, :]
    width = tl.minimum(block, N - first).to(tl.float32)
    gz, for_gain = gradient_tile(
        gy_ptr, u_ptr, r_ptr, gain_ptr, rows, columns, mask, tile_n, M, N, blocks, width, ACT,
        GATE, GAIN, "",
    )  # fmt: skip
    if GAIN:
        # Partial sums per tile, added up outside: atomics would make the result depend on timing.
        partial = tl.sum(for_gain, axis=0)
        tl.store(partial_ptr + tl.program_id(1).to(tl.int64) * N + columns, partial, mask=inside)
    bits = magnitude(gz)
    if ROWS:
        tl.atomic_max(row_ptr + rows, tl.max(bits, axis=1), mask=rows < M, sem="relaxed")
    if ROWS_T:
        tl.atomic_max(column_ptr + columns, tl.max(bits, axis=0), mask=inside, sem="relaxed")
    if not ROWS:
        tl.atomic_max(row_ptr, tl.max(tl.max(bits, axis=1), axis=0), sem="relaxed")
    if ROWS and not ROWS_T:
        tl.atomic_max(column_ptr, tl.max(tl.max(bits, axis=1), axis=0), sem="relaxed")


@triton.jit
def _quantize_kernel(
    gy_ptr, u_ptr, r_ptr, gain_ptr, row_ptr, column_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr,
    M, M_UP, N, block, blocks,
    BM: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr,
    GAIN: tl.constexpr, ROWS: tl.constexpr, ROWS_T: tl.constexpr, PDL: tl.constexpr,
    MAX: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, MAX_T: tl.constexpr,
    EXPONENT_T: tl.constexpr, MANTISSA_T: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile_n = tl.program_id(0)
    # Last rows first: what the first kernel read last still lies in L2.
    tile_m = tl.num_programs(1) - 1 - tl.program_id(1)
    first = tile_n * block
    local = tl.arange(0, BN)
    columns = first + local
    inside = (local < block) & (columns < N)
    rows = tile_m * BM + tl.arange(0, BM)
    row_ok = rows < M
    mask = row_ok[:, None] & inside[None, :]
    width = tl.minimum(block, N - first).to(tl.float32)
    gz, _ = gradient_tile(
        gy_ptr, u_ptr, r_ptr, gain_ptr, rows, columns, mask, tile_n, M, N, blocks, width, ACT,
        GATE, GAIN, "evict_first",
    )  # fmt: skip
    is_first_n = tile_n == 0
    is_first_m = tile_m == 0
    if ROWS:
        scale, inverse = power_of_two(
            tl.load(row_ptr + rows, mask=row_ok, other=0), EXPONENT, MANTISSA
        )
        tl.store(scale_ptr + rows, scale, mask=row_ok & is_first_n)
        q = gz * inverse[:, None]
    else:
        scale, inverse = power_of_two(tl.load(row_ptr), EXPONENT, MANTISSA)
        tl.store(scale_ptr, scale, mask=is_first_n & is_first_m)
        q = gz * inverse
    # NaN passes the clamp: a non-finite row must stay visible.
    q = tl.clamp(q, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL).to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :], q, mask=mask)
    # Transposed before it is rounded: Triton 3.6 mixes up the elements of an FP8 tile that is
    # stored both as it lies and transposed.
    turned = tl.trans(gz)
    if ROWS_T:
        scale_t, inverse_t = power_of_two(
            tl.load(column_ptr + columns, mask=inside, other=0), EXPONENT_T, MANTISSA_T
        )
        tl.store(scale_t_ptr + columns, scale_t, mask=inside & is_first_m)
        t = turned * inverse_t[:, None]
    else:
        bits = tl.load(column_ptr) if ROWS else tl.load(row_ptr)
        scale_t, inverse_t = power_of_two(bits, EXPONENT_T, MANTISSA_T)
        tl.store(scale_t_ptr, scale_t, mask=is_first_n & is_first_m)
        t = turned * inverse_t
    t = tl.clamp(t, -MAX_T, MAX_T, propagate_nan=tl.PropagateNan.ALL)
    at = columns.to(tl.int64)[:, None] * M_UP + rows[None, :]
    # Rows past M are zeros: they fill the tail up to M_UP.
    tail = inside[:, None] & (rows < M_UP)[None, :]
    tl.store(qt_ptr + at, t.to(qt_ptr.dtype.element_ty), mask=tail)


_launch_amax = Launcher(_amax_kernel)
_launch_quantize = Launcher(_quantize_kernel)


def fused_backward(
    gy: Tensor,
    u: Tensor,
    r: Tensor,
    gain: Tensor | None,
    block: int,
    act: str,
    gate: bool,
    rows: bool,
    dtype: torch.dtype,
    rows_t: bool,
    dtype_t: torch.dtype,
    *,
    amax: Tensor | None = None,
    block_m: int | None = None,
    warps: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """gy, u (M, N), r (M, blocks) FP32, gain (N,) -> q (M, N), scale, qt (N, M rounded up to 16),
    scale_t, dL/dgain (N,) in gain's dtype (empty without).

    rows: one scale per row of dL/dz ((M, 1)), else one for all (()); rows_t: per column ((N, 1)).
    `dtype` and `dtype_t` are FP8 types; scales are powers of two. Bytes equal those of
    `lowering.chain.fused_chain_backward_ref` where FP32 rounding of dL/dz agrees. amax: int32 (2,),
    with tensor scales only: its first value becomes the bits of max |dL/dz|.
    """
    gy, u, r = gy.contiguous(), u.contiguous(), r.contiguous()
    signature = (
        u.shape, gy.dtype, u.dtype, None if gain is None else gain.dtype, block, act, gate, rows,
        dtype, rows_t, dtype_t, u.device, block_m, warps,
    )  # fmt: skip
    how = RECIPES.get(signature)
    if how is None:
        how = RECIPES[signature] = _recipe(*signature)
    (m, n), device = u.shape, u.device
    q = torch.empty((m, n), dtype=dtype, device=device)
    qt = torch.empty((n, how.m_up), dtype=dtype_t, device=device)
    scale = torch.empty((m, 1) if rows else (), dtype=torch.float32, device=device)
    scale_t = torch.empty((n, 1) if rows_t else (), dtype=torch.float32, device=device)
    row_size = m if rows else 1
    if amax is None:
        amax = torch.zeros(row_size + (n if rows_t else 1), dtype=torch.int32, device=device)
    else:
        amax.zero_()
    if m == 0:
        ggain = torch.zeros_like(gain) if gain is not None else gy.new_empty((0,))
        return q, scale.fill_(1.0), qt, scale_t.fill_(1.0), ggain
    row_amax, column_amax = amax[:row_size], amax[row_size:]
    shape = (how.grid[1], n) if gain is not None else (1,)
    partial = torch.empty(shape, dtype=torch.float32, device=device)
    by = gain if gain is not None else r
    ins = (gy, u, r, by, row_amax, column_amax)
    even = aligned(gy, u, r, by, column_amax)
    key = (how.key, even)
    first, second = how.compiled.get(even, (None, None))
    args = (*ins, partial, *how.sizes)
    if first is not None:
        start(first, how.grid, args, how.same.values(), device)
    else:
        _launch_amax(key, how.grid, args, how.same, device, num_warps=how.warps, pdl=how.pdl)
    ggain = gy.new_empty((0,)) if gain is None else partial.sum(0).to(gain.dtype)
    args = (*ins, q, scale, qt, scale_t, m, how.m_up, *how.sizes[1:])
    if second is not None:
        start(second, how.grid, args, how.formats.values(), device)
    else:
        _launch_quantize(key, how.grid, args, how.formats, device, num_warps=how.warps, pdl=how.pdl)
        how.compiled[even] = (_launch_amax.compiled(key), _launch_quantize.compiled(key))
    return q, scale, qt, scale_t, ggain


@dataclass
class _Recipe:
    """All of the two launches that follows from shapes, dtypes and switches."""

    m_up: int
    grid: tuple[int, int]
    warps: int
    pdl: bool
    sizes: tuple[int, int, int, int]
    #: Constants of the first kernel, and of the second.
    same: dict[str, Any]
    formats: dict[str, Any]
    key: Hashable
    #: Are all pointers aligned -> both compiled kernels.
    compiled: dict[bool, tuple[Any, Any]] = field(default_factory=dict)


RECIPES = Recipes()


def _recipe(
    shape: torch.Size,
    gy_dtype: torch.dtype,
    u_dtype: torch.dtype,
    gain_dtype: torch.dtype | None,
    block: int,
    act: str,
    gate: bool,
    rows: bool,
    dtype: torch.dtype,
    rows_t: bool,
    dtype_t: torch.dtype,
    device: torch.device,
    block_m: int | None,
    warps: int | None,
) -> _Recipe:
    m, n = shape
    blocks = bn.count_blocks(n, block)
    m_up = -(-m // 16) * 16
    wide = max(triton.next_power_of_2(block), 16)
    gain = gain_dtype is not None
    # Measured on an H200 (bench_fused_backward --sweep): small tiles keep more loads in flight.
    # With a gain, tiles as tall as the registers allow: each adds a row to the partial sums.
    size = block_m or max(16, min(32, (8192 if gain else 4096) // wide))
    warps = warps or (8 if wide >= 128 else 4)
    same = {"BM": size, "BN": wide, "ACT": ACTIVATIONS[act], "GATE": gate}
    pdl = overlaps(device)
    same |= {"GAIN": gain, "ROWS": rows, "ROWS_T": rows_t, "PDL": pdl}
    (exponent, mantissa), (exponent_t, mantissa_t) = exponent_split(dtype), exponent_split(dtype_t)
    formats = {
        "MAX": FP8_MAX[dtype],
        "EXPONENT": exponent,
        "MANTISSA": mantissa,
        "MAX_T": FP8_MAX[dtype_t],
        "EXPONENT_T": exponent_t,
        "MANTISSA_T": mantissa_t,
    }
    sizes = (m, n, block, blocks)
    key = (
        kind(m, m_up),
        sizes[1:],
        (gy_dtype, u_dtype, gain_dtype, dtype, dtype_t),
        tuple(same.values()),
        warps,
        device.index,
    )
    grid = (blocks, triton.cdiv(m, size))
    return _Recipe(m_up, grid, warps, pdl, sizes, same, same | formats, key)
