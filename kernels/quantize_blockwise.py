"""Guarded FP8 quantisers with a scale per 1 x 128 or 128 x 128 values, in plain aten.

For t (R, C), scales fp32, powers of two, with the guards of `quantize.py`:

    groups  1 x 128    scale (R, ceil(C / 128))
    blocks  128 x 128  scale (ceil(R / 128), ceil(C / 128))

The last group or block of a ragged size has a scale of its own values only. Nothing branches on a
symbolic size: such a size is always filled up with zeros, which no maximum sees.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from loka_compile.kernels.quantize import FP8_MAX
from loka_compile.kernels.quantize import cast
from loka_compile.kernels.quantize import fake_cast
from loka_compile.kernels.quantize import power_of_two_scale
from loka_compile.kernels.quantize import widened

BLOCK = 128


def count(size: int) -> int:
    """How many groups of 128 cover `size`."""
    return (size + BLOCK - 1) // BLOCK


def fill(t: Tensor, rows: int, columns: int) -> Tensor:
    """t (R, C) -> (R, C) rounded up to multiples of `rows` and `columns`, zeros in the new places.

    `t` itself for static sizes that are multiples. The new sizes are spelled multiple * (...), so
    that their divisibility is known without a guard. FP8 works: its zero has the byte 0.
    """
    for dim, multiple in ((0, rows), (1, columns)):
        size = t.shape[dim]
        if multiple == 1 or (isinstance(size, int) and size % multiple == 0):
            continue
        whole = multiple * ((size + multiple - 1) // multiple)
        dtype = t.dtype
        bits = t.contiguous().view(torch.uint8) if t.element_size() == 1 else t
        filled = _extended(bits, dim, size, whole)
        t = filled.view(dtype) if filled.dtype != dtype else filled
    return t


def _extended(t: Tensor, dim: int, size: int, whole: int) -> Tensor:
    """t with zeros behind its `size` rows or columns, up to `whole`.

    Of a symbolic size nothing is asked: of a scatter a compiler wants to know whether its slice is
    all there is, of a sum of parts whether one is empty, and each answer would be a guard.
    """
    if isinstance(size, int):
        shape = [whole, t.shape[1]] if dim == 0 else [t.shape[0], whole]
        return torch.slice_scatter(t.new_zeros(shape), t, dim=dim, start=0, end=size)
    at = torch.arange(whole, device=t.device)
    inside = at < size
    found = torch.index_select(t, dim, torch.where(inside, at, 0))
    return torch.where(inside.unsqueeze(1 - dim), found, torch.zeros_like(found))


def spread_groups(s: Tensor, columns: int) -> Tensor:
    """(R, ceil(C / 128)) -> (R, C): each scale beside the values that it belongs to."""
    wide = s.unsqueeze(2).expand(s.shape[0], s.shape[1], BLOCK)
    return wide.reshape(s.shape[0], s.shape[1] * BLOCK)[:, :columns]


def spread_blocks(s: Tensor, rows: int, columns: int) -> Tensor:
    """(ceil(R / 128), ceil(C / 128)) -> (R, C)."""
    tall = s.unsqueeze(1).expand(s.shape[0], BLOCK, s.shape[1])
    return spread_groups(tall.reshape(s.shape[0] * BLOCK, s.shape[1])[:rows], columns)


def quantize_groups(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(R, C) -> (q (R, C), scale (R, ceil(C / 128)))."""
    return _groups(t, dtype, cast)


def quantize_blocks(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(R, C) -> (q (R, C), scale (ceil(R / 128), ceil(C / 128)))."""
    return _blocks(t, dtype, cast)


def fake_quantize_groups(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `quantize_groups`, with the FP8 values held in FP32."""
    return _groups(t, dtype, fake_cast)


def fake_quantize_blocks(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `quantize_blocks`, with the FP8 values held in FP32."""
    return _blocks(t, dtype, fake_cast)


Cast = Callable[[Tensor, Tensor, torch.dtype], Tensor]


def _groups(t: Tensor, dtype: torch.dtype, to_fp8: Cast) -> tuple[Tensor, Tensor]:
    # Maximum and cast run over the same three dimensions, so that a compiler makes one loop of
    # them; a scale spread over columns would be indexed by a division instead.
    rows, columns = t.shape
    grouped = fill(t, 1, BLOCK).reshape(rows, count(columns), BLOCK)
    amax = widened(grouped).abs().amax(dim=2, keepdim=True).to(torch.float32)
    scale, inverse = power_of_two_scale(amax, dtype)
    q = to_fp8(grouped, inverse, dtype).reshape(rows, count(columns) * BLOCK)
    return _cut(q, t), scale.squeeze(2)


def _blocks(t: Tensor, dtype: torch.dtype, to_fp8: Cast) -> tuple[Tensor, Tensor]:
    down, across = count(t.shape[0]), count(t.shape[1])
    blocked = fill(t, BLOCK, BLOCK).reshape(down, BLOCK, across, BLOCK)
    amax = widened(blocked).abs().amax(dim=(1, 3), keepdim=True).to(torch.float32)
    scale, inverse = power_of_two_scale(amax, dtype)
    q = to_fp8(blocked, inverse, dtype).reshape(down * BLOCK, across * BLOCK)
    return _cut(q, t), scale.reshape(down, across)


def _cut(q: Tensor, like: Tensor) -> Tensor:
    """Without the rows and columns that were filled in."""
    return q[: like.shape[0], : like.shape[1]]


def quantize_blockwise_ref(
    t: Tensor, dtype: torch.dtype, *, block_rows: int
) -> tuple[Tensor, Tensor]:
    """The definition, in FP64, block by block; block_rows is 1 or 128."""
    wide = t.double()
    maximum = FP8_MAX[dtype]
    q = torch.empty(t.shape, dtype=torch.float64, device=t.device)
    rows = (t.shape[0] + block_rows - 1) // block_rows
    scale = torch.empty((rows, count(t.shape[1])), dtype=torch.float64, device=t.device)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = (
                slice(i * block_rows, (i + 1) * block_rows),
                slice(j * BLOCK, (j + 1) * BLOCK),
            )
            amax = wide[at].abs().amax()
            exponent = torch.ceil(torch.log2(amax / maximum)).clamp(-126, 126)
            one = torch.where(torch.isfinite(amax), torch.exp2(exponent), float("nan"))
            scale[i, j] = one
            q[at] = (wide[at] / one).clamp(-maximum, maximum)
    return q.to(torch.float32).to(dtype), scale.to(torch.float32)
