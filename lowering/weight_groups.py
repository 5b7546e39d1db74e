"""All FP8 forms of a training step's weights in two launches, in place of two for each weight.

    quantize_weights   ws (N, K) each -> q, qt, scales; `places` says what lies where in them

The values are those of `quantize_weight`. Three results in all, of which readers take views: a
result each would cost the host more to allocate than the launches do, and a functional op's results
must not share memory, as Inductor sees it. The price is memory: of a group the forward's FP8 copies
live from its first reader to its last, one byte a value, and dgrad's from there to the last dgrad.
So a group is no larger than `MOST_BYTES`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.kernels.weight_group import Asked
from loka_compile.kernels.weight_group import Place
from loka_compile.kernels.weight_group import formats
from loka_compile.kernels.weight_group import layout
from loka_compile.kernels.weight_group import quantize_weights_ref
from loka_compile.lowering import chain
from loka_compile.lowering import direct_calls
from loka_compile.lowering import weights
from loka_compile.lowering.library import LIBRARY

#: Of the FP8 values of one group, both orientations: 128 MiB live longer than they would alone.
MOST_BYTES = 256 << 20


@functools.cache
def _asked(fwd: tuple[str, ...], dgrad: tuple[str, ...]) -> tuple[Asked, ...]:
    found = []
    for one, other in zip(fwd, dgrad, strict=True):
        straight, turned = weights.scales(one, other)
        found.append(Asked(straight, turned, rows_up=not chain.is_own(one)))
    return tuple(found)


def places(
    shapes: Sequence[tuple[int, int]], fwd: Sequence[str], dgrad: Sequence[str]
) -> tuple[tuple[Place, Place, Place, Place], ...]:
    """Of each weight's w8 (in q), w_scale (in scales), w8t (in qt) and wt_scale (in scales)."""
    return layout(tuple(shapes), _asked(tuple(fwd), tuple(dgrad))).places


LIBRARY.define(
    "quantize_weights(Tensor[] ws, ScalarType dtype, str[] fwd, str[] dgrad, int[] sizes) "
    "-> (Tensor q, Tensor qt, Tensor scales)"
)


@_compat.register_fake("loka::quantize_weights", LIBRARY)
def _(ws, dtype, fwd, dgrad, sizes):
    asked = _asked(tuple(fwd), tuple(dgrad))
    sizes = layout(tuple((w.shape[0], w.shape[1]) for w in ws), asked).sizes
    types = (*formats(asked), torch.float32)
    return tuple(ws[0].new_empty((size,), dtype=of) for size, of in zip(sizes, types, strict=True))


def quantize_weights(
    ws: Sequence[Tensor],
    dtype: torch.dtype,
    fwd: Sequence[str],
    dgrad: Sequence[str],
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """ws: (N, K) each, taken in `dtype`; fwd, dgrad: a kernel for each -> q, qt, scales.

    sizes: N, K and their strides, of one weight after the other, as the graph knows them. Raises
    ValueError for weights that are new and have others.
    """
    asked = _asked(tuple(fwd), tuple(dgrad))
    if ws[0].device.type != "cuda" or _compat.why_no_triton() is not None:
        return quantize_weights_ref(ws, asked, dtype)
    from loka_compile.kernels import quantize_weights as kernels

    return kernels.quantize_weights(ws, asked, dtype, tuple(sizes))


LIBRARY.impl("quantize_weights", quantize_weights, "CompositeExplicitAutograd")
direct_calls.register("quantize_weights", cuda=quantize_weights, cpu=quantize_weights)
