"""A matrix as FP8 in one or both orientations, in plain torch: what `quantize_both` computes.

    x (R, C)   ->   q  (R, C), scale             contracted along C: the forward's operands
                    qt (C, R up to 16), scale_t  contracted along R: wgrad's; of a weight, dgrad's

Rows of qt are the columns of x; its places past R hold zeros. Scales, of q (of qt: R and C change
places):

    tensor, static ()   row (R, 1)   1x128 (R, groups of C)   128x128 (blocks of R, groups of C)

The last two are stored as their reader wants them (`Scale`):

    torch scaled_mm v2   A 1x128: turned, 4;   B 1x128: turned;      B 128x128: 4
    DeepGEMM             A 1x128: turned, 4;   B 1x128: turned, 4;   B 128x128: as above
    FBGEMM               A 1x128: turned;      B 128x128: turned;    128x128 on both sides: as above
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loka_compile.kernels import quantize as q
from loka_compile.kernels import quantize_blockwise as qb

KINDS = ("tensor", "row", "1x128", "128x128", "static")
_BLOCKS = ("1x128", "128x128")


@dataclass(frozen=True)
class Scale:
    """One orientation: what shares a scale, the FP8 type, how the scales lie in memory.

    turned: groups of the contraction come first, (groups, lines) instead of (lines, groups).
    multiple: the last dimension is filled up to a multiple of this, with zeros.
    """

    kind: str
    dtype: torch.dtype = torch.float8_e4m3fn
    turned: bool = False
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"scale kind {self.kind!r}, want one of {KINDS}")
        if self.kind not in _BLOCKS and (self.turned or self.multiple != 1):
            raise ValueError(f"a {self.kind} scale has one layout")
        filled = self.turned or self.kind == "128x128"
        if self.multiple not in ((1, 4) if filled else (1,)):
            raise ValueError("scales are filled up to 4: 128x128 ones, and turned 1x128 ones")

    def shape(self, lines: int, contraction: int) -> tuple[int, ...]:
        """As stored, of a matrix (lines, contraction)."""
        if self.kind in ("tensor", "static"):
            return ()
        if self.kind == "row":
            return (lines, 1)
        first = lines if self.kind == "1x128" else qb.count(lines)
        shape = (first, qb.count(contraction))
        outer, inner = reversed(shape) if self.turned else shape
        return outer, round_up(inner, self.multiple)


@dataclass(frozen=True)
class Both:
    """What was asked for; the rest is None. A static scale is the one that was given."""

    q: Tensor | None = None
    scale: Tensor | None = None
    qt: Tensor | None = None
    scale_t: Tensor | None = None


def round_up(size: int, to: int = 16) -> int:
    return -(-size // to) * to


def quantize_both_ref(
    x: Tensor,
    straight: Scale | None,
    turned: Scale | None,
    *,
    static: Tensor | None = None,
    rows_up: bool = False,
    columns_up: bool = False,
    dtype: torch.dtype | None = None,
) -> Both:
    """The definition. See `quantize_both`."""
    if dtype is not None:
        x = x.to(dtype)
    rows, columns = (16 if rows_up else 1), (16 if columns_up else 1)
    out: list[Tensor | None] = [None] * 4
    if straight is not None:
        one, scale = _one(x, straight, static)
        out[:2] = qb.fill(one, rows, columns), scale
    if turned is not None:
        one, scale = _one(x.t(), turned, static)
        out[2:] = qb.fill(one, columns, 16), scale
    return Both(*out)


def _one(t: Tensor, rule: Scale, static: Tensor | None) -> tuple[Tensor, Tensor]:
    if rule.kind == "static":
        if static is None:
            raise ValueError("a static scale is known beforehand: pass static=")
        return q.quantize_static(t, static, rule.dtype).contiguous(), static
    if rule.kind == "tensor":
        one, scale = q.quantize_tensorwise(t, rule.dtype)
    elif rule.kind == "row":
        one, scale = q.quantize_rowwise(t, rule.dtype)
    else:
        blocks = rule.kind == "128x128"
        one, scale = (qb.quantize_blocks if blocks else qb.quantize_groups)(t, rule.dtype)
        scale = qb.fill(scale.t() if rule.turned else scale, 1, rule.multiple).contiguous()
    return one.contiguous(), scale
