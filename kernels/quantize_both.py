"""One read of a matrix -> FP8 as it lies and FP8 transposed, each with its own kind of scale.

Bytes and layouts are those of `orientations.quantize_both_ref`. Static, 1x128 and 128x128 scales
are settled within a tile. Tensor and row scales need a maximum first, which a kernel of its own
finds; the second read then meets most of the matrix in L2. The Triton code is in
`quantize_kernels` and, where every tile has one scale for each orientation, in `quantize_words`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from loka_compile.kernels.call import Call
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import Recipes
from loka_compile.kernels.launch import kind
from loka_compile.kernels.orientations import Both
from loka_compile.kernels.orientations import Scale
from loka_compile.kernels.orientations import round_up
from loka_compile.kernels.quantize import FP8_MAX
from loka_compile.kernels.quantize import exponent_split
from loka_compile.kernels.quantize_kernels import amax_kernel
from loka_compile.kernels.quantize_kernels import quantize_kernel
from loka_compile.kernels.quantize_words import quantize_words_kernel
from loka_compile.kernels.room import Room
from loka_compile.kernels.room import allocator
from loka_compile.kernels.room import dense

_KINDS = {"": 0, "tensor": 1, "row": 2, "1x128": 3, "128x128": 4, "static": 5}
_NEED_AMAX = ("tensor", "row")
#: Of which a tile has one scale.
_OF_A_TILE = ("tensor", "128x128", "static")
_ROUND = {torch.bfloat16: 1, torch.float16: 2}
_SIZE = 128
#: Of the launch that finds maxima; each leaves one, and each program that quantises joins them.
_MOST_PROGRAMS = 512
_FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


_launch_amax = Launcher(amax_kernel)
_launch_quantize = Launcher(quantize_kernel)
_launch_words = Launcher(quantize_words_kernel)


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
        x.shape, x.stride(), x.dtype, x.get_device(), _rule(straight), _rule(turned),
        None if static is None else static.get_device(), rows_up, columns_up, dtype,
    )  # fmt: skip
    how = RECIPES.get(signature)
    if how is None:
        how = RECIPES[signature] = _recipe(
            x.shape, x.stride(), x.dtype, straight, turned, static is None, rows_up, columns_up,
            dtype, x.device,
        )  # fmt: skip
    make = allocator(how.device)
    q = None if how.q is None else make(*how.q)
    scale = static if how.scale is None else make(*how.scale)
    qt = None if how.qt is None else make(*how.qt)
    scale_t = static if how.scale_t is None else make(*how.scale_t)
    result = Both(q, q if q is None else scale, qt, qt if qt is None else scale_t)
    if x.numel() == 0:
        for one in (q, qt):
            if one is not None:
                one.view(torch.uint8).zero_()
        for room, one in ((how.scale, scale), (how.scale_t, scale_t)):
            if room is not None and one is not None:
                one.fill_(1.0)
        return result
    amax = x
    if how.amax is not None:
        amax = make(*how.amax)
        if how.gathered:
            amax.zero_()
        if not how.find.start([x.data_ptr(), amax.data_ptr()]):
            how.find.run((x, amax))
    outs = (result.q, result.scale, result.qt, result.scale_t)
    tensors = (x, amax, *[x if one is None else one for one in outs])
    if not how.write.start([t.data_ptr() for t in tensors]):
        how.write.run(tensors)
    return result


def _rule(scale: Scale | None) -> tuple[Any, ...] | None:
    """All of it, in what hashes faster."""
    if scale is None:
        return None
    return scale.kind, scale.dtype, scale.turned, scale.multiple


@dataclass
class _Recipe:
    device: torch.device
    #: None where an orientation was not asked for; of a static scale.
    q: Room | None
    scale: Room | None
    qt: Room | None
    scale_t: Room | None
    #: For maxima: of all, then the columns, then the rows; None where none is needed.
    amax: Room | None
    #: Those of columns or rows are gathered by atomics, from zero.
    gathered: bool
    find: Call
    write: Call


RECIPES = Recipes()


def _recipe(
    shape: torch.Size,
    strides: tuple[int, ...],
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
    programs = max(1, min(triton.cdiv(r, _SIZE) * triton.cdiv(c, _SIZE), _MOST_PROGRAMS))
    find_key = (same, rounded, kinds)
    first = (r, c, *strides)
    find = Call(_launch_amax, (programs,), first, block | asked, find_key, device, num_warps=8)
    parts = programs if asked["WHOLE"] else 0
    size = parts + (c if columns else 0) + (r if rows else 0)
    up = triton.next_power_of_2(max(parts, 1))
    words = all(k in _OF_A_TILE for k in kinds)
    constants: dict[str, Any] = {**block, **({} if words else {"COLUMNS": columns}), "PARTS": up}
    for rule, tail in ((straight, ""), (turned, "_T")):
        constants |= _constants(rule, tail)
    stored = (*_places(straight, (r, c)), *_places(turned, (c, r)))
    sizes = (r, c, qr, qc, r_up, qtc)
    types = tuple((rule.dtype if rule is not None else x_dtype) for rule in rules)
    key = (same, kind(*sizes[2:], *stored, parts), tuple(constants.values()), types)
    passed = (*sizes, *strides, *stored, parts)
    if words:
        write = Call(_launch_words, grid, passed, constants, key, device, num_warps=8)
    else:
        write = Call(_launch_quantize, grid, (*passed, 0), constants, key, device, num_warps=8)
    amax = dense((size,), torch.int32) if any(k in _NEED_AMAX for k in kinds) else None
    results = (
        *_rooms((qr, qc), (r, c), straight),
        *_rooms((qtc, r_up), (c, r), turned),
    )
    return _Recipe(device, *results, amax, columns or rows, find, write)


def _rooms(
    shape: tuple[int, int], lines: tuple[int, int], rule: Scale | None
) -> tuple[Room | None, Room | None]:
    if rule is None:
        return None, None
    scale = None
    if rule.kind != "static":
        scale = dense(rule.shape(*lines), torch.float32)
    return dense(shape, rule.dtype), scale


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
