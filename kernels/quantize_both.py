"""One read of a matrix -> FP8 as it lies and FP8 transposed, each with its own kind of scale.

Bytes and layouts are those of `orientations.quantize_both_ref`. Static, 1x128 and 128x128 scales
are settled within a tile. Tensor and row scales need a maximum first, which a kernel of its own
finds; the second read then meets most of the matrix in L2.
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

from loka_compile.kernels.fp8 import magnitude
from loka_compile.kernels.fp8 import power_of_two
from loka_compile.kernels.fp8 import to_bf16
from loka_compile.kernels.fp8 import to_fp8
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import Recipes
from loka_compile.kernels.launch import aligned
from loka_compile.kernels.launch import kind
from loka_compile.kernels.launch import start
from loka_compile.kernels.orientations import Both
from loka_compile.kernels.orientations import Scale
from loka_compile.kernels.orientations import round_up
from loka_compile.kernels.quantize import FP8_MAX
from loka_compile.kernels.quantize import exponent_split

_KINDS = {"": 0, "tensor": 1, "row": 2, "1x128": 3, "128x128": 4, "static": 5}
_NEED_AMAX = ("tensor", "row")
_ROUND = {torch.bfloat16: 1, torch.float16: 2}
_SIZE = 128
_FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def _load(
    x_ptr, rows, columns, mask, stride_r, stride_c, ROUND: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """One tile in FP32, rounded to bf16 (ROUND = 1) or fp16 (2) on the way; zero outside."""
    # 64-bit offsets: R * C passes 2**31 for real batches.
    at = rows.to(tl.int64)[:, None] * stride_r + columns.to(tl.int64)[None, :] * stride_c
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if ROUND == 1:
        x = to_bf16(x, EXACT)
    elif ROUND == 2:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def _amax_kernel(
    x_ptr, amax_ptr, R, C, stride_r, stride_c,
    BR: tl.constexpr, BC: tl.constexpr, ROUND: tl.constexpr, EXACT: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """amax bits: one of all, then C of the columns, then R of the rows, where asked for."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (rows < R)[:, None] & (columns < C)[None, :]
    x = _load(x_ptr, rows, columns, mask, stride_r, stride_c, ROUND, EXACT)
    bits = magnitude(x)
    if WHOLE:
        tl.atomic_max(amax_ptr, tl.max(tl.max(bits, axis=1), axis=0), sem="relaxed")
    at = amax_ptr + 1
    if COLUMNS:
        top = tl.max(bits, axis=0)
        tl.atomic_max(at + columns, top, mask=columns < C, sem="relaxed")
        at += C
    if ROWS:
        tl.atomic_max(at + rows, tl.max(bits, axis=1), mask=rows < R, sem="relaxed")


@triton.jit
def _scaled(
    tile, lines, line_tile, along, amax_ptr, whole_ptr, scale_ptr, LINES, outer, room, groups,
    KIND: tl.constexpr, TURNED: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """`tile` (lines, contraction) over its scale, which is written.

    The tile is number `line_tile` of its lines and `along` of the contraction. A stored block scale
    has `outer` places from row to row and `room` in a row, those without a scale being zero.
    """
    real = lines < LINES
    if KIND == 5:
        # No power of two: divided as the reference divides, to the last bit.
        out = tl.div_rn(tile, tl.zeros_like(tile) + tl.load(scale_ptr))
    elif KIND == 1:
        scale, inverse = power_of_two(tl.load(whole_ptr), EXPONENT, MANTISSA)
        tl.store(scale_ptr, scale, mask=(line_tile == 0) & (along == 0))
        out = tile * inverse
    elif KIND == 2:
        bits = tl.load(amax_ptr + lines, mask=real, other=0)
        scale, inverse = power_of_two(bits, EXPONENT, MANTISSA)
        tl.store(scale_ptr + lines, scale, mask=real & (along == 0))
        out = tile * inverse[:, None]
    elif KIND == 3:
        bits = tl.max(magnitude(tile), axis=1)
        scale, inverse = power_of_two(bits, EXPONENT, MANTISSA)
        at = lines.to(tl.int64)
        if TURNED:
            held = (lines < room) & (along < groups)
            tl.store(scale_ptr + along * outer + at, tl.where(real, scale, 0.0), mask=held)
        else:
            tl.store(scale_ptr + at * outer + along, scale, mask=real & (along < groups))
        out = tile * inverse[:, None]
    else:
        bits = tl.max(tl.max(magnitude(tile), axis=1), axis=0)
        scale, inverse = power_of_two(bits, EXPONENT, MANTISSA)
        near = tl.arange(0, 4)
        blocks = tl.cdiv(LINES, 128)
        inner = line_tile if TURNED else along
        count = blocks if TURNED else groups
        row = along if TURNED else line_tile
        # The last of a row also writes the places that fill it up.
        held = (near == 0) | ((inner == count - 1) & (inner + near < room))
        held = held & (line_tile < blocks) & (along < groups)
        value = tl.where(near == 0, scale, 0.0)
        tl.store(scale_ptr + row * outer + inner + near, value, mask=held)
        out = tile * inverse
    return out


@triton.jit
def _quantize_kernel(
    x_ptr, amax_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, R, C, QR, QC, TR, TC,
    stride_r, stride_c, outer, room, outer_t, room_t,
    BR: tl.constexpr, BC: tl.constexpr, ROUND: tl.constexpr, EXACT: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr, TURNED: tl.constexpr, MAX: tl.constexpr, EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    KIND_T: tl.constexpr, TURNED_T: tl.constexpr, MAX_T: tl.constexpr, EXPONENT_T: tl.constexpr,
    MANTISSA_T: tl.constexpr,
):  # fmt: skip
    """q (QR, QC), qt (TC, TR): sizes filled up; KIND 0 leaves an orientation out."""
    tile_r = tl.program_id(0)
    tile_c = tl.program_id(1)
    rows = tile_r * BR + tl.arange(0, BR)
    columns = tile_c * BC + tl.arange(0, BC)
    mask = (rows < R)[:, None] & (columns < C)[None, :]
    x = _load(x_ptr, rows, columns, mask, stride_r, stride_c, ROUND, EXACT)
    by_row = amax_ptr + 1 + (C if COLUMNS else 0)
    if KIND > 0:
        v = _scaled(
            x, rows, tile_r, tile_c, by_row, amax_ptr, scale_ptr, R, outer, room,
            tl.cdiv(C, 128), KIND, TURNED, EXPONENT, MANTISSA,
        )  # fmt: skip
        # Places that fill up are zeros, beside a NaN scale too.
        q = to_fp8(tl.where(mask, v, 0.0), q_ptr.dtype.element_ty, MAX, EXACT)
        at = rows.to(tl.int64)[:, None] * QC + columns[None, :]
        tl.store(q_ptr + at, q, mask=(rows < QR)[:, None] & (columns < QC)[None, :])
    if KIND_T > 0:
        # Transposed before it is rounded: Triton 3.6 mixes up the elements of an FP8 tile that is
        # stored both as it lies and transposed.
        t = _scaled(
            tl.trans(x), columns, tile_c, tile_r, amax_ptr + 1, amax_ptr, scale_t_ptr, C, outer_t,
            room_t, tl.cdiv(R, 128), KIND_T, TURNED_T, EXPONENT_T, MANTISSA_T,
        )  # fmt: skip
        turned = (columns < C)[:, None] & (rows < R)[None, :]
        qt = to_fp8(tl.where(turned, t, 0.0), qt_ptr.dtype.element_ty, MAX_T, EXACT)
        at = columns.to(tl.int64)[:, None] * TR + rows[None, :]
        tl.store(qt_ptr + at, qt, mask=(columns < TC)[:, None] & (rows < TR)[None, :])


_launch_amax = Launcher(_amax_kernel)
_launch_quantize = Launcher(_quantize_kernel)


def quantize_both(
    x: Tensor,
    straight: Scale | None,
    turned: Scale | None,
    *,
    static: Tensor | None = None,
    rows_up: bool = False,
    columns_up: bool = False,
    dtype: torch.dtype | None = None,
) -> Both:
    """x (R, C), floating, any strides -> q (R, C) and its scale, qt (C, R up to 16) and its scale.

    straight, turned: the scale of each orientation; None leaves it out. static: FP32 (), of the
    static kinds. rows_up, columns_up: q gets its rows, q its columns and qt its rows rounded up to
    16; scales keep their own sizes. dtype: bf16 or fp16, to which x is rounded before anything
    else, as a cast under autocast would. What fills up is zero. Raises ValueError for FP8 types
    that Triton does not write, and without a `static` that is asked for.
    """
    signature = (
        x.shape, x.stride(), x.dtype, straight, turned, static is None, rows_up, columns_up, dtype,
        x.device,
    )  # fmt: skip
    how = RECIPES.get(signature)
    if how is None:
        how = RECIPES[signature] = _recipe(*signature)
    r, c = x.shape
    q, scale = _outputs(how.shape, (r, c), straight, static, x.device)
    qt, scale_t = _outputs(how.shape_t, (c, r), turned, static, x.device)
    result = Both(q, scale, qt, scale_t)
    if r == 0 or c == 0:
        for one in (q, qt):
            if one is not None:
                one.view(torch.uint8).zero_()
        for one, rule in ((scale, straight), (scale_t, turned)):
            if one is not None and rule is not None and rule.kind != "static":
                one.fill_(1.0)
        return result
    amax = x
    if how.amax:
        amax = torch.zeros(how.amax, dtype=torch.int32, device=x.device)
        how.find.launch(_launch_amax, (x, amax, *how.find.sizes), aligned(x), x.device)
    outs = tuple(x if one is None else one for one in (q, scale, qt, scale_t))
    args = (x, amax, *outs, *how.write.sizes)
    how.write.launch(_launch_quantize, args, aligned(x, *outs), x.device)
    return result


@dataclass
class _Launch:
    """One kernel's launch: what does not change with the addresses."""

    grid: tuple[int, int]
    sizes: tuple[int, ...]
    constants: dict[str, Any]
    key: Hashable
    #: Are all pointers aligned -> the compiled kernel.
    compiled: dict[bool, Any] = field(default_factory=dict)

    def launch(self, by: Launcher, args: tuple[Any, ...], even: bool, device: Any) -> None:
        compiled = self.compiled.get(even)
        if compiled is not None:
            start(compiled, self.grid, args, self.constants.values(), device)
            return
        key = (self.key, even)
        by(key, self.grid, args, self.constants, device, num_warps=8)
        self.compiled[even] = by.compiled(key)


@dataclass
class _Recipe:
    shape: tuple[int, int]
    shape_t: tuple[int, int]
    #: Places for maxima: one of all, then the columns, then the rows; 0 where none is needed.
    amax: int
    find: _Launch
    write: _Launch


RECIPES = Recipes()


def _recipe(
    shape: torch.Size,
    strides: tuple[int, int],
    x_dtype: torch.dtype,
    straight: Scale | None,
    turned: Scale | None,
    no_static: bool,
    rows_up: bool,
    columns_up: bool,
    dtype: torch.dtype | None,
    device: torch.device,
) -> _Recipe:
    rules = (straight, turned)
    if straight is None and turned is None:
        raise ValueError("neither orientation was asked for")
    if any(rule is not None and rule.dtype not in _FORMATS for rule in rules):
        raise ValueError(f"FP8 types are {_FORMATS}")
    if no_static and any(rule is not None and rule.kind == "static" for rule in rules):
        raise ValueError("a static scale is known beforehand: pass static=")
    r, c = shape
    r_up, c_up = round_up(r), round_up(c)
    qr, qc = (r_up if rows_up else r), (c_up if columns_up else c)
    qtc = c_up if columns_up else c
    kinds = tuple(rule.kind if rule is not None else "" for rule in rules)
    rounded = _ROUND.get(dtype, 0) if dtype not in (None, x_dtype) else 0
    columns, rows = kinds[1] == "row", kinds[0] == "row"
    block = {"BR": _SIZE, "BC": _SIZE, "ROUND": rounded, "EXACT": device.type != "cuda"}
    grid = (triton.cdiv(max(qr, r_up), _SIZE), triton.cdiv(max(qc, c_up), _SIZE))
    same = (kind(r, *strides), c, x_dtype, device.index)
    asked = {"WHOLE": "tensor" in kinds, "ROWS": rows, "COLUMNS": columns}
    find = _Launch(grid, (r, c, *strides), block | asked, (same, rounded, kinds))
    size = 1 + (c if columns else 0) + (r if rows else 0)
    constants: dict[str, Any] = {**block, "COLUMNS": columns}
    for rule, tail in ((straight, ""), (turned, "_T")):
        constants |= _constants(rule, tail)
    stored = (*_places(straight, (r, c)), *_places(turned, (c, r)))
    sizes = (r, c, qr, qc, r_up, qtc)
    types = tuple((rule.dtype if rule is not None else x_dtype) for rule in rules)
    key = (same, kind(*sizes[2:], *stored), tuple(constants.values()), types)
    write = _Launch(grid, (*sizes, *strides, *stored), constants, key)
    amax = size if any(k in _NEED_AMAX for k in kinds) else 0
    return _Recipe((qr, qc), (qtc, r_up), amax, find, write)


def _outputs(
    shape: tuple[int, int],
    lines: tuple[int, int],
    rule: Scale | None,
    static: Tensor | None,
    device: torch.device,
) -> tuple[Tensor | None, Tensor | None]:
    if rule is None:
        return None, None
    scale = static
    if rule.kind != "static":
        scale = torch.empty(rule.shape(*lines), dtype=torch.float32, device=device)
    return torch.empty(shape, dtype=rule.dtype, device=device), scale


def _constants(rule: Scale | None, tail: str) -> dict[str, Any]:
    kind_, turned, dtype = (
        ("", False, torch.float8_e4m3fn) if rule is None else (rule.kind, rule.turned, rule.dtype)
    )
    exponent, mantissa = exponent_split(dtype)
    return {
        "KIND" + tail: _KINDS[kind_],
        "TURNED" + tail: turned,
        "MAX" + tail: FP8_MAX[dtype],
        "EXPONENT" + tail: exponent,
        "MANTISSA" + tail: mantissa,
    }


def _places(rule: Scale | None, lines: tuple[int, int]) -> tuple[int, int]:
    """(from row to row, in a row) of a stored block scale."""
    if rule is None or rule.kind not in ("1x128", "128x128"):
        return 1, 1
    room = rule.shape(*lines)[1]
    return room, room
