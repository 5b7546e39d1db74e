"""`loka::bounded_e4m3`: the result of a BlockNorm as e4m3 with a scale known beforehand.

|y| <= sqrt(block) * max|gain| for any input, so no pass over y looks for its maximum. A
decomposition: Inductor writes y8 in the kernel that makes y. `passes/handover.py` puts it there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.kernels.quantize import quantize_static
from loka_compile.kernels.quantize_blockwise import fill
from loka_compile.lowering.chain import E4M3
from loka_compile.lowering.chain import round_up
from loka_compile.lowering.chain_formulas import static_scale
from loka_compile.lowering.libraries.base import ALIGNMENT
from loka_compile.lowering.library import LIBRARY

LIBRARY.define(
    "bounded_e4m3(Tensor y, Tensor? gain, int block, bool turned) "
    "-> (Tensor y8, Tensor scale, Tensor y8t)"
)


def bounded_e4m3(
    y: Tensor, gain: Tensor | None, block: int, turned: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y (..., F), a BlockNorm's result or a view of it, gain that of the norm -> y8 (..., F),
    scale () FP32, and with `turned` y8t (F, M up to 16), zero-filled, M the other sizes' product.
    """
    scale = static_scale(gain, block, y.device)
    y8 = quantize_static(y, scale, E4M3)
    if not turned:
        return y8, scale, y.new_empty((0,), dtype=E4M3)
    return y8, scale, fill(y8.reshape(-1, y.shape[-1]).t().contiguous(), 1, ALIGNMENT)


LIBRARY.impl("bounded_e4m3", bounded_e4m3, "CompositeExplicitAutograd")
BOUNDED = torch.ops.loka.bounded_e4m3.default
_compat.install_decompositions({BOUNDED: bounded_e4m3})


@_compat.register_fake("loka::bounded_e4m3", LIBRARY)
def _(y, gain, block, turned):
    m = math.prod(y.shape[:-1])
    return (
        y.new_empty(y.shape, dtype=E4M3),
        y.new_empty((), dtype=torch.float32),
        y.new_empty((y.shape[-1], round_up(m)) if turned else (0,), dtype=E4M3),
    )
