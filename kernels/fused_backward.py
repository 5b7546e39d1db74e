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

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from loka_compile.kernels import block_norm as bn
from loka_compile.kernels.backward_kernels import backward_amax_kernel
from loka_compile.kernels.backward_kernels import backward_quantize_kernel
from loka_compile.kernels.call import Call
from loka_compile.kernels.epilogue import lanes_of
from loka_compile.kernels.fp8 import LIKE
from loka_compile.kernels.gradient_tile import ACTIVATIONS
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import Recipes
from loka_compile.kernels.launch import kind
from loka_compile.kernels.launch import overlaps
from loka_compile.kernels.pairs import spelt_out
from loka_compile.kernels.quantize import FP8_MAX
from loka_compile.kernels.quantize import exponent_split
from loka_compile.kernels.room import Room
from loka_compile.kernels.room import allocator
from loka_compile.kernels.room import dense

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
    at: int = 0,
    block_m: int | None = None,
    lines: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """gy, u (M, N), r (M, blocks) FP32, gain (N,) -> q (M, N), scale, qt (N, M rounded up to 16),
    scale_t, dL/dgain as partial sums (`lanes_of`, N) in FP32 (empty without a gain).

    rows: one scale per row of dL/dz ((M, 1)), else one for all (()); rows_t: per column ((N, 1)).
    `dtype` and `dtype_t` are FP8 types; scales are powers of two. Bytes equal those of
    `lowering.chain_backward.fused_chain_backward_ref` where FP32 rounding of dL/dz agrees.
    cells: dense pairs of FP32, in any dtype, with tensor scales only: pair `at` takes max |dL/dz|,
    as it is and the largest so far.
    block_m: rows of a tile of the first kernel; lines: sixteenths of those of the second.
    """
    gy, u, r = gy.contiguous(), u.contiguous(), r.contiguous()
    signature = (
        u.shape, gy.dtype, gy.get_device(), u.dtype, u.get_device(), r.get_device(),
        None if gain is None else (gain.dtype, gain.get_device()), block, act, gate, rows, dtype,
        rows_t, dtype_t, cells is not None, block_m, lines,
    )  # fmt: skip
    how = RECIPES.get(signature)
    if how is None:
        how = RECIPES[signature] = _recipe(
            u.shape, gy.dtype, u.dtype, None if gain is None else gain.dtype, block, act, gate,
            rows, dtype, rows_t, dtype_t, u.device, block_m, lines, cells is not None,
        )  # fmt: skip
    make = allocator(how.device)
    q, scale, qt, scale_t = make(*how.q), make(*how.scale), make(*how.qt), make(*how.scale_t)
    partial = make(*how.partial)
    if u.shape[0] == 0:
        return q, scale.fill_(1.0), qt, scale_t.fill_(1.0), partial.zero_()
    scratch = make(*how.scratch)
    # Maxima of rows and columns are gathered by atomics, from zero; of the whole, all are written.
    if rows or rows_t:
        scratch.zero_()
    by = gain if gain is not None else r
    # Views that only a first launch needs are not made for each: the kernels see addresses.
    first = scratch.data_ptr()
    ins = [gy.data_ptr(), u.data_ptr(), r.data_ptr(), by.data_ptr(), first, first + how.columns]
    if not how.find.start([*ins, partial.data_ptr()]):
        how.find.run((gy, u, r, by, *_split(scratch, how.amax), partial))
    record = first if cells is None else cells.data_ptr() + 8 * at
    outs = [q.data_ptr(), scale.data_ptr(), qt.data_ptr(), scale_t.data_ptr(), record]
    if not how.write.start([*ins, *outs]):
        pair = scratch
        if cells is not None:
            pair = cells.detach().view(torch.int32)[2 * at : 2 * at + 2]
        where = _split(scratch, how.amax)
        how.write.run((gy, u, r, by, *where, q, scale, qt.view(torch.int64), scale_t, pair))
    return q, scale, qt, scale_t, partial


def _split(scratch: Tensor, amax: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Maxima of rows (or of the whole) and of columns."""
    return scratch.split(amax) if amax[1] else (scratch, scratch)  # type: ignore[arg-type, return-value]


@dataclass
class _Recipe:
    """All of the two launches that follows from shapes, dtypes and switches."""

    device: torch.device
    q: Room
    scale: Room
    qt: Room
    scale_t: Room
    partial: Room
    scratch: Room
    #: Places in scratch for the maxima of both orientations; bytes before the second's.
    amax: tuple[int, int]
    columns: int
    find: Call
    write: Call


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
    switches |= {"ROWS": rows, "ROWS_T": rows_t, "PDL": pdl, "EXACT": spelt_out(device)}
    even = n % block == 0 and block == wide
    same = {"BM": size, "BN": wide, "WHOLE": even and m % size == 0, **switches}
    whole = even and m % (16 * lines) == 0
    (exponent, mantissa), (exponent_t, mantissa_t) = exponent_split(dtype), exponent_split(dtype_t)
    formats = {
        "LINES": lines,
        "BN": wide,
        "WHOLE": whole,
        **switches,
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
    # Maxima of the whole: one a program.
    parts = blocks * used
    formats["PARTS"] = triton.next_power_of_2(blocks * lanes)
    formats["RECORD"] = record
    amax = (m if rows else parts, n if rows_t else parts if rows else 0)
    key = (
        kind(m, m_up, parts),
        (n, block, blocks),
        (gy_dtype, u_dtype, gain_dtype, dtype, dtype_t),
        (*same.values(), lines, whole, record),
        device.index,
    )
    sizes, grid = (m, n, block, blocks, lanes), (blocks, used)
    find = Call(_launch_amax, grid, sizes, same, key, device, num_warps=warps, pdl=pdl)
    # The second's tile is one of few warps.
    # One dimension: CUDA takes no more than 65,535 in the others.
    written, tiles = (m, m_up, n, block, blocks, parts), blocks * triton.cdiv(m_up, 16 * lines)
    write = Call(_launch_quantize, (tiles,), written, formats, key, device, num_warps=4, pdl=pdl)
    fp32 = torch.float32
    return _Recipe(
        device,
        dense((m, n), dtype),
        dense((m, 1) if rows else (), fp32),
        dense((n, m_up), dtype_t),
        dense((n, 1) if rows_t else (), fp32),
        dense((lanes, n) if gain else (0,), fp32),
        dense((sum(amax),), torch.int32),
        amax,
        4 * amax[0] if amax[1] else 0,
        find,
        write,
    )
