"""One read of a matrix -> FP8 as it lies and FP8 transposed, each with its own kind of scale.

Bytes and layouts are those of `orientations.quantize_both_ref`. Static, 1x128 and 128x128 scales
are settled within a tile. Tensor and row scales need a maximum first, which a kernel of its own
finds; the second read then meets most of the matrix in L2. The Triton code is in
`quantize_kernels` and, where every tile has one scale for each orientation, in `quantize_words`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
import triton
from torch import Tensor

from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import Recipes
from loka_compile.kernels.launch import aligned
from loka_compile.kernels.launch import empty
from loka_compile.kernels.launch import kind
from loka_compile.kernels.launch import start
from loka_compile.kernels.orientations import Both
from loka_compile.kernels.orientations import Scale
from loka_compile.kernels.orientations import round_up
from loka_compile.kernels.quantize import FP8_MAX
from loka_compile.kernels.quantize import exponent_split
from loka_compile.kernels.quantize_kernels import amax_kernel
from loka_compile.kernels.quantize_kernels import quantize_kernel
from loka_compile.kernels.quantize_words import quantize_words_kernel

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
    signature: tuple[Any, ...] = (
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
        if how.gathered:
            amax = torch.zeros(how.amax, dtype=torch.int32, device=x.device)
        else:
            amax = empty((how.amax,), torch.int32, x.device)
        how.find.launch((x, amax, *how.find.sizes), aligned(x), x.device)
    outs = tuple(x if one is None else one for one in (q, scale, qt, scale_t))
    args = (x, amax, *outs, *how.write.sizes)
    how.write.launch(args, aligned(x, *outs), x.device)
    return result


@dataclass
class _Launch:
    """One kernel's launch: what does not change with the addresses."""

    by: Launcher
    grid: tuple[int, ...]
    sizes: tuple[int, ...]
    constants: dict[str, Any]
    key: Hashable
    #: Are all pointers aligned -> the compiled kernel.
    compiled: dict[bool, Any] = field(default_factory=dict)

    def launch(self, args: tuple[Any, ...], even: bool, device: Any) -> None:
        compiled = self.compiled.get(even)
        if compiled is not None:
            start(compiled, self.grid, args, self.constants.values(), device)
            return
        key = (self.key, even)
        self.by(key, self.grid, args, self.constants, device, num_warps=8)
        self.compiled[even] = self.by.compiled(key)


@dataclass
class _Recipe:
    shape: tuple[int, int]
    shape_t: tuple[int, int]
    #: Places for maxima: of all, then the columns, then the rows; 0 where none is needed.
    amax: int
    #: Those of columns or rows are gathered by atomics, from zero.
    gathered: bool
    find: _Launch
    write: _Launch


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
    find = _Launch(
        _launch_amax, (programs,), (r, c, *strides), block | asked, (same, rounded, kinds)
    )
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
        write = _Launch(_launch_words, grid, passed, constants, key)
    else:
        write = _Launch(_launch_quantize, grid, (*passed, 0), constants, key)
    amax = size if any(k in _NEED_AMAX for k in kinds) else 0
    return _Recipe((qr, qc), (qtc, r_up), amax, columns or rows, find, write)


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
        scale = empty(rule.shape(*lines), torch.float32, device)
    return empty(shape, rule.dtype, device), scale


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
