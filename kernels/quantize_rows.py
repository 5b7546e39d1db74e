"""One scale per row in one launch: each row is read once, and stays in registers for its cast.

For a matrix that nothing before it could quantise on its way: what Inductor makes of the formula
reads long rows twice. Bytes are those of `quantize.quantize_rowwise`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents
from triton.language.extra.cuda import gdc_wait

from loka_compile.kernels.fp8 import magnitude
from loka_compile.kernels.fp8 import power_of_two
from loka_compile.kernels.fp8 import to_fp8
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import aligned
from loka_compile.kernels.launch import empty
from loka_compile.kernels.launch import kind
from loka_compile.kernels.launch import overlaps
from loka_compile.kernels.quantize import FP8_MAX
from loka_compile.kernels.quantize import exponent_split

#: Longer rows do not fit the registers of one program.
LONGEST = 16384
#: Values of one program: enough bytes in flight, and programs for every SM at small batches.
_VALUES = 1024
#: Values of one warp.
_PER_WARP = 512


@triton.jit
def _rows_kernel(
    x_ptr, q_ptr, scale_ptr, R, C, QC, stride_r, stride_c,
    BR: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr, EXACT: tl.constexpr, MAX: tl.constexpr,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    columns = tl.arange(0, BC)
    real = rows < R
    mask = real[:, None] & (columns < C)[None, :]
    # 64-bit offsets: R * C passes 2**31 for real batches.
    at = rows.to(tl.int64)[:, None] * stride_r + columns.to(tl.int64)[None, :] * stride_c
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    bits = tl.max(magnitude(x), axis=1)
    scale, inverse = power_of_two(bits, EXPONENT, MANTISSA)
    tl.store(scale_ptr + rows, scale, mask=real)
    # Places that fill up are zeros, beside a NaN scale too.
    v = tl.where(mask, x * inverse[:, None], 0.0)
    q = to_fp8(v, q_ptr.dtype.element_ty, MAX, EXACT)
    to = rows.to(tl.int64)[:, None] * QC + columns[None, :]
    tl.store(q_ptr + to, q, mask=real[:, None] & (columns < QC)[None, :])


_launch = Launcher(_rows_kernel)


def quantize_rows(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, columns_up: bool = False
) -> tuple[Tensor, Tensor]:
    """x (R, C), floating, any strides, C up to `LONGEST` -> q (R, C), scale (R, 1) FP32.

    columns_up: C of q is rounded up to 16, with zeros. Raises ValueError for longer rows and for
    FP8 types other than e4m3fn and e5m2.
    """
    r, c = x.shape
    if c > LONGEST or c == 0:
        raise ValueError(f"rows of {c} values; 1 to {LONGEST} fit")
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(f"{dtype}: e4m3fn and e5m2 are known here")
    qc = -(-c // 16) * 16 if columns_up else c
    q = empty((r, qc), dtype, x.device)
    scale = empty((r, 1), torch.float32, x.device)
    if r == 0:
        return q, scale
    wide = max(triton.next_power_of_2(qc), 16)
    tall = max(1, min(16, _VALUES // wide))
    warps = max(1, min(8, tall * wide // _PER_WARP))
    exponent, mantissa = exponent_split(dtype)
    constants = {
        "BR": tall,
        "BC": wide,
        "PDL": overlaps(x.device),
        "EXACT": x.device.type != "cuda",
        "MAX": FP8_MAX[dtype],
        "EXPONENT": exponent,
        "MANTISSA": mantissa,
    }
    key = (
        kind(r, *x.stride()),
        (c, qc),
        (tall, warps),
        x.dtype,
        dtype,
        aligned(x, q),
        x.device.index,
    )
    args = (x, q, scale, r, c, qc, *x.stride())
    grid = (triton.cdiv(r, tall),)
    pdl = overlaps(x.device)
    _launch(key, grid, args, constants, x.device, num_warps=warps, pdl=pdl)
    return q, scale
