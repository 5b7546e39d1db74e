"""One read of a matrix -> FP8 as it lies and FP8 transposed, each with its own kind of scale.

Bytes and layouts are those of `orientations.quantize_both_ref`. Static, 1x128 and 128x128 scales
are settled within a tile. Tensor and row scales need a maximum first, which a kernel of its own
finds; the second read then meets most of the matrix in L2. The Triton code is in
`quantize_kernels`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import aligned
from loka_compile.kernels.orientations import Both
from loka_compile.kernels.orientations import Scale
from loka_compile.kernels.orientations import round_up
from loka_compile.kernels.quantize import FP8_MAX
from loka_compile.kernels.quantize import exponent_split
from loka_compile.kernels.quantize_kernels import amax_kernel
from loka_compile.kernels.quantize_kernels import quantize_kernel

_KINDS = {"": 0, "tensor": 1, "row": 2, "1x128": 3, "128x128": 4, "static": 5}
_NEED_AMAX = ("tensor", "row")
_ROUND = {torch.bfloat16: 1, torch.float16: 2}
_SIZE = 128
_FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


_launch_amax = Launcher(amax_kernel)
_launch_quantize = Launcher(quantize_kernel)


@dataclass(frozen=True, eq=False)
class _Plan:
    """All of a call that its tensors' addresses do not change; itself part of the launch keys."""

    shapes: tuple[tuple[int, int], tuple[int, int]]
    scales: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    #: Places in the amax buffer; 0 where every scale is settled within its tile.
    places: int
    grid: tuple[int, int]
    amax: dict[str, Any]
    quantise: dict[str, Any]
    #: (R, C), then the sizes with what fills them up, then how block scales are stored.
    sizes: tuple[int, ...]
    stored: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def _plan(
    r: int,
    c: int,
    strides: tuple[int, int],
    source: torch.dtype,
    straight: Scale | None,
    turned: Scale | None,
    rows_up: bool,
    columns_up: bool,
    rounded: int,
    cuda: bool,
) -> _Plan:
    r_up, c_up = round_up(r), round_up(c)
    qr, qc = (r_up if rows_up else r), (c_up if columns_up else c)
    tc = c_up if columns_up else c
    kinds = tuple("" if rule is None else rule.kind for rule in (straight, turned))
    rows, columns = kinds[0] == "row", kinds[1] == "row"
    places = 0
    if any(k in _NEED_AMAX for k in kinds):
        # One place of all, then the columns, then the rows.
        places = 1 + (c if columns else 0) + (r if rows else 0)
    block = {"BR": _SIZE, "BC": _SIZE, "ROUND": rounded, "EXACT": not cuda}
    quantise: dict[str, Any] = {**block, "COLUMNS": columns}
    for rule, tail in ((straight, ""), (turned, "_T")):
        quantise |= _constants(rule, tail)
    scales = (_scale_shape(straight, r, c), _scale_shape(turned, c, r))
    return _Plan(
        shapes=((qr, qc), (tc, r_up)),
        scales=scales,
        places=places,
        grid=(triton.cdiv(max(qr, r_up), _SIZE), triton.cdiv(max(qc, c_up), _SIZE)),
        amax={**block, "WHOLE": "tensor" in kinds, "ROWS": rows, "COLUMNS": columns},
        quantise=quantise,
        sizes=(r, c, qr, qc, r_up, tc, *strides),
        stored=(*_places(straight, scales[0]), *_places(turned, scales[1])),
    )


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
    _check(straight, turned, static)
    (r, c), device = x.shape, x.device
    rounded = _ROUND.get(dtype, 0) if dtype not in (None, x.dtype) else 0
    cuda = device.type == "cuda"
    strides = x.stride()
    plan = _plan(
        r, c, strides, x.dtype, straight, turned, rows_up, columns_up, rounded, cuda
    )  # fmt: skip
    out: list[Tensor | None] = [None] * 4
    for at, rule in ((0, straight), (1, turned)):
        if rule is None:
            continue
        out[2 * at] = torch.empty(plan.shapes[at], dtype=rule.dtype, device=device)
        shape = plan.scales[at]
        scale = static if shape is None else torch.empty(shape, device=device)
        out[2 * at + 1] = scale
    if r == 0 or c == 0:
        return _nothing(Both(*out), straight, turned)
    amax = x
    if plan.places:
        amax = torch.zeros(plan.places, dtype=torch.int32, device=device)
        _launch_amax(
            (plan, aligned(x), device.index),
            plan.grid,
            (x, amax, r, c, *strides),
            plan.amax,
            device,
            num_warps=8,
        )
    tensors = [x if one is None else one for one in out]
    _launch_quantize(
        (plan, aligned(x, *tensors), device.index),
        plan.grid,
        (x, amax, *tensors, *plan.sizes, *plan.stored),
        plan.quantise,
        device,
        num_warps=8,
    )
    return Both(*out)


def _check(straight: Scale | None, turned: Scale | None, static: Tensor | None) -> None:
    rules = [rule for rule in (straight, turned) if rule is not None]
    if not rules:
        raise ValueError("neither orientation was asked for")
    for rule in rules:
        if rule.dtype not in _FORMATS:
            raise ValueError(f"FP8 types are {_FORMATS}")
        if rule.kind == "static" and static is None:
            raise ValueError("a static scale is known beforehand: pass static=")


def _nothing(result: Both, straight: Scale | None, turned: Scale | None) -> Both:
    """An empty x: what fills up is zero, and scales that are there are 1."""
    for q in (result.q, result.qt):
        if q is not None:
            q.view(torch.uint8).zero_()
    for scale, rule in ((result.scale, straight), (result.scale_t, turned)):
        if scale is not None and rule is not None and rule.kind != "static":
            scale.fill_(1.0)
    return result


def _scale_shape(rule: Scale | None, lines: int, contraction: int) -> tuple[int, ...] | None:
    """None where the scale is given, or there is none."""
    if rule is None or rule.kind == "static":
        return None
    return rule.shape(lines, contraction)


def _constants(rule: Scale | None, tail: str) -> dict[str, Any]:
    dtype = torch.float8_e4m3fn if rule is None else rule.dtype
    exponent, mantissa = exponent_split(dtype)
    return {
        "KIND" + tail: _KINDS["" if rule is None else rule.kind],
        "TURNED" + tail: rule is not None and rule.turned,
        "MAX" + tail: FP8_MAX[dtype],
        "EXPONENT" + tail: exponent,
        "MANTISSA" + tail: mantissa,
    }


def _places(rule: Scale | None, shape: tuple[int, ...] | None) -> tuple[int, int]:
    """(from row to row, in a row) of a stored block scale."""
    if rule is None or shape is None or rule.kind not in ("1x128", "128x128"):
        return 1, 1
    return shape[1], shape[1]
