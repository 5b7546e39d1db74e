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
from torch import Tensor

from loka_compile.kernels import block_norm as bn
from loka_compile.kernels.backward_kernels import backward_amax_kernel
from loka_compile.kernels.backward_kernels import backward_quantize_kernel
from loka_compile.kernels.epilogue import lanes_of
from loka_compile.kernels.fp8 import LIKE
from loka_compile.kernels.gradient_tile import ACTIVATIONS
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import Recipes
from loka_compile.kernels.launch import aligned
from loka_compile.kernels.launch import empty
from loka_compile.kernels.launch import kind
from loka_compile.kernels.launch import overlaps
from loka_compile.kernels.launch import start
from loka_compile.kernels.quantize import FP8_MAX
from loka_compile.kernels.quantize import exponent_split

_launch_amax = Launcher(backward_amax_kernel)
_launch_quantize = Launcher(backward_quantize_kernel)


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
    cells: Tensor | None = None,
    block_m: int | None = None,
    lines: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """gy, u (M, N), r (M, blocks) FP32, gain (N,) -> q (M, N), scale, qt (N, M rounded up to 16),
    scale_t, dL/dgain as partial sums (`lanes_of`, N) in FP32 (empty without a gain).

    rows: one scale per row of dL/dz ((M, 1)), else one for all (()); rows_t: per column ((N, 1)).
    `dtype` and `dtype_t` are FP8 types; scales are powers of two. Bytes equal those of
    `lowering.chain_backward.fused_chain_backward_ref` where FP32 rounding of dL/dz agrees.
    cells: FP32 (2,), with tensor scales only: take max |dL/dz|, as it is and the largest so far.
    block_m: rows of a tile of the first kernel; lines: sixteenths of those of the second.
    """
    gy, u, r = gy.contiguous(), u.contiguous(), r.contiguous()
    signature = (
        u.shape, gy.dtype, u.dtype, None if gain is None else gain.dtype, block, act, gate, rows,
        dtype, rows_t, dtype_t, u.device, block_m, lines, cells is not None,
    )  # fmt: skip
    how = RECIPES.get(signature)
    if how is None:
        how = RECIPES[signature] = _recipe(*signature)
    (m, n), device = u.shape, u.device
    q = empty((m, n), dtype, device)
    qt = empty((n, how.m_up), dtype_t, device)
    scale = empty((m, 1) if rows else (), torch.float32, device)
    scale_t = empty((n, 1) if rows_t else (), torch.float32, device)
    shape = (how.lanes, n) if gain is not None else (0,)
    partial = empty(shape, torch.float32, device)
    if m == 0:
        return q, scale.fill_(1.0), qt, scale_t.fill_(1.0), partial.zero_()
    # Maxima of rows and columns are gathered by atomics, from zero; of the whole, all are written.
    if rows or rows_t:
        row_amax = torch.zeros(sum(how.amax), dtype=torch.int32, device=device)
    else:
        row_amax = empty((sum(how.amax),), torch.int32, device)
    column_amax = row_amax
    if how.amax[1]:
        row_amax, column_amax = row_amax.split(how.amax)
    by = gain if gain is not None else r
    ins = (gy, u, r, by, row_amax, column_amax)
    even = aligned(gy, u, r, by, column_amax)
    key = (how.key, even)
    first, second = how.compiled.get(even, (None, None))
    args = (*ins, partial, *how.sizes, how.lanes)
    lanes = (how.grid[0], how.used)
    if first is not None:
        start(first, lanes, args, how.same.values(), device)
    else:
        _launch_amax(key, lanes, args, how.same, device, num_warps=how.warps, pdl=how.pdl)
    bits = row_amax if cells is None else cells.view(torch.int32)
    out = (q, scale, qt.view(torch.int64), scale_t, bits)
    args = (*ins, *out, m, how.m_up, *how.sizes[1:], how.parts)
    if second is not None:
        start(second, how.grid, args, how.formats.values(), device)
    else:
        _launch_quantize(key, how.grid, args, how.formats, device, num_warps=4, pdl=how.pdl)
        how.compiled[even] = (_launch_amax.compiled(key), _launch_quantize.compiled(key))
    return q, scale, qt, scale_t, partial


@dataclass
class _Recipe:
    """All of the two launches that follows from shapes, dtypes and switches."""

    m_up: int
    #: Of the second kernel.
    grid: tuple[int, int]
    #: Of the first: the second's tile is one of few warps.
    warps: int
    pdl: bool
    #: Partial sums of dL/dgain, and how many programs share a block's rows to make them.
    lanes: int
    used: int
    #: Maxima of the whole: one a program.
    parts: int
    #: Places for the maxima of both orientations.
    amax: tuple[int, int]
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
    lines: int | None,
    record: bool,
) -> _Recipe:
    m, n = shape
    blocks = bn.count_blocks(n, block)
    m_up = -(-m // 16) * 16
    wide = max(triton.next_power_of_2(block), 16)
    gain = gain_dtype is not None
    # Measured on an H200 (bench_fused_backward --sweep): small tiles keep more loads in flight.
    size = block_m or max(16, min(32, 4096 // wide))
    warps = 8 if wide >= 128 else 4
    # Eight values a thread and step of the second kernel's four warps, or fewer.
    lines = lines or max(1, min(16, 1024 // wide))
    pdl = overlaps(device)
    switches = {"ACT": ACTIVATIONS[act], "GATE": gate, "GAIN": gain}
    switches |= {"ROWS": rows, "ROWS_T": rows_t, "PDL": pdl}
    same = {"BM": size, "BN": wide, **switches}
    whole = m % (16 * lines) == 0 and n % block == 0 and block == wide
    (exponent, mantissa), (exponent_t, mantissa_t) = exponent_split(dtype), exponent_split(dtype_t)
    formats = {
        "LINES": lines,
        "BN": wide,
        "WHOLE": whole,
        **switches,
        "EXACT": device.type != "cuda",
        "MAX": FP8_MAX[dtype],
        "EXPONENT": exponent,
        "MANTISSA": mantissa,
        "LIKE_T": LIKE[dtype_t],
        "MAX_T": FP8_MAX[dtype_t],
        "EXPONENT_T": exponent_t,
        "MANTISSA_T": mantissa_t,
    }
    lanes = lanes_of(n, block)
    used = min(lanes, max(triton.cdiv(m, size), 1))
    parts = blocks * used
    formats["PARTS"] = triton.next_power_of_2(blocks * lanes)
    formats["RECORD"] = record
    amax = (m if rows else parts, n if rows_t else parts if rows else 0)
    sizes = (m, n, block, blocks)
    key = (
        kind(m, m_up, parts),
        sizes[1:],
        (gy_dtype, u_dtype, gain_dtype, dtype, dtype_t),
        (*same.values(), lines, whole, record),
        device.index,
    )
    grid = (blocks, triton.cdiv(m_up, 16 * lines))
    return _Recipe(m_up, grid, warps, pdl, lanes, used, parts, amax, sizes, same, formats, key)
