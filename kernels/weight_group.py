"""Many weights as FP8 in both orientations, in plain torch: what `quantize_weights` computes.

    q       FP8 (places,)    every w8, which the forward reads
    qt      FP8 (places,)    every w8t, which dgrad reads
    scales  FP32 (places,)   every w_scale and wt_scale

What belongs to one weight lies where `layout` says. Three results for all weights, since the host
takes as long to allocate one as to start a kernel; q and qt apart, since only qt has to live until
the backward. Places that nothing lies in are not written.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loka_compile.kernels.orientations import Both
from loka_compile.kernels.orientations import Scale
from loka_compile.kernels.orientations import quantize_both_ref
from loka_compile.kernels.orientations import round_up

#: Each tensor begins at a multiple of so many bytes, as kernels read them best.
_BYTES = 128


@dataclass(frozen=True)
class Asked:
    """Of one weight: how its forward and its dgrad read it, with scales that are contiguous.

    rows_up: w8 gets its rows rounded up to 16, as it gets its columns and w8t both its sizes.
    """

    straight: Scale
    turned: Scale
    rows_up: bool = True


@dataclass(frozen=True)
class Place:
    """A contiguous tensor in a result. offset: of its first value, in values."""

    shape: tuple[int, ...]
    offset: int

    @property
    def strides(self) -> tuple[int, ...]:
        return (self.shape[1], 1) if self.shape else ()

    def of(self, result: Tensor) -> Tensor:
        return result.as_strided(self.shape, self.strides, self.offset)


@dataclass(frozen=True)
class Layout:
    """places: of w8, w_scale, w8t and wt_scale of each weight. sizes: of q, qt and scales."""

    places: tuple[tuple[Place, Place, Place, Place], ...]
    sizes: tuple[int, int, int]


@functools.lru_cache(maxsize=1024)
def layout(shapes: tuple[tuple[int, int], ...], asked: tuple[Asked, ...]) -> Layout:
    """Of weights of these shapes (N, K)."""
    ends = [0, 0, 0]

    def placed(which: int, shape: tuple[int, ...], size: int) -> Place:
        at = ends[which]
        ends[which] = at + round_up(math.prod(shape), _BYTES // size)
        return Place(shape, at)

    places = []
    for (n, k), one in zip(shapes, asked, strict=True):
        n_up, k_up = round_up(n), round_up(k)
        places.append(
            (
                placed(0, (n_up if one.rows_up else n, k_up), 1),
                placed(2, one.straight.shape(n, k), 4),
                placed(1, (k_up, n_up), 1),
                placed(2, one.turned.shape(k, n), 4),
            )
        )
    return Layout(tuple(places), (ends[0], ends[1], ends[2]))


def formats(asked: Sequence[Asked]) -> tuple[torch.dtype, torch.dtype]:
    """FP8 types of q and qt. Raises ValueError where weights differ in them."""
    found = {(one.straight.dtype, one.turned.dtype) for one in asked}
    if len(found) != 1:
        raise ValueError(f"one FP8 type for each orientation, got {found}")
    return found.pop()


def quantize_weights_ref(
    ws: Sequence[Tensor],
    asked: tuple[Asked, ...],
    dtype: torch.dtype | None = None,
    by: Callable[..., Both] = quantize_both_ref,
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, one weight after the other. See `quantize_weights.quantize_weights`.

    by: quantises one of them, as `quantize_both_ref` does.
    """
    held = layout(tuple((w.shape[0], w.shape[1]) for w in ws), asked)
    device, types = ws[0].device, (*formats(asked), torch.float32)
    q, qt, scales = (
        torch.empty(size, dtype=of, device=device)
        for size, of in zip(held.sizes, types, strict=True)
    )
    for w, one, places in zip(ws, asked, held.places, strict=True):
        made = by(w, one.straight, one.turned, dtype=dtype, rows_up=one.rows_up, columns_up=True)
        parts = (made.q, made.scale, made.qt, made.scale_t)
        for part, place, to in zip(parts, places, (q, scales, qt, scales), strict=True):
            assert part is not None
            place.of(to).copy_(part)
    return q, qt, scales
