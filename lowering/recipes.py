"""Recipes: how the two operands of one GEMM are scaled and cast, and how it accumulates.

Every direction of a linear `y = x @ w.T` is one product A @ B.T whose operands are quantised along
the contraction (their last dimension):

    direction   A (rows, contraction)   B (rows, contraction)   result
    fwd         x    (M, K)             w    (N, K)             y  (M, N)
    dgrad       gy   (M, N)             w.T  (K, N)             gx (M, K)
    wgrad       gy.T (N, M)             x.T  (K, M)             gw (N, K)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

DIRECTIONS = ("fwd", "dgrad", "wgrad")

#: Name of the kernel that leaves a GEMM in the precision the model was written in.
HIGH_PRECISION = "high_precision"

#: A kernel name with this suffix runs the same arithmetic in software.
EMULATED = "+emulated"

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


class Granularity(Enum):
    """How many values share one scale, for an operand (R, C) quantised along C.

    The shape of the scale tensor (fp32, multipliers that dequantise), with BLOCK = 128:
        TENSOR, STATIC  ()
        NONE            ()       always 1: the values are only cast
        ROW             (R, 1)
        GROUP           (R, ceil(C / 128))               1 x 128
        BLOCK           (ceil(R / 128), ceil(C / 128))   128 x 128
    STATIC is a scale known beforehand: nothing is read to find it.
    """

    TENSOR = "tensor"
    ROW = "row"
    GROUP = "1x128"
    BLOCK = "128x128"
    STATIC = "static"
    NONE = "none"


@dataclass(frozen=True)
class Operand:
    """One operand's rule: what shares a scale, and the FP8 format."""

    granularity: Granularity
    dtype: torch.dtype = E4M3

    @property
    def rows(self) -> bool:
        """One scale per row, and no finer."""
        return self.granularity is Granularity.ROW

    @property
    def blocks(self) -> bool:
        """Several scales along the contraction: they act inside the GEMM's main loop."""
        return self.granularity in (Granularity.GROUP, Granularity.BLOCK)

    @property
    def scaled(self) -> bool:
        return self.granularity is not Granularity.NONE

    @property
    def isolates_rows(self) -> bool:
        """A NaN in one row stays there."""
        return self.granularity in (Granularity.ROW, Granularity.GROUP, Granularity.NONE)


@dataclass(frozen=True)
class Gemm:
    """One direction of a recipe; None in a recipe's field means high precision."""

    a: Operand
    b: Operand
    fast_accum: bool = False


@dataclass(frozen=True)
class Recipe:
    """Three directions. Their choice is independent: a site may mix recipes."""

    name: str
    fwd: Gemm | None
    dgrad: Gemm | None
    wgrad: Gemm | None

    def gemm(self, direction: str) -> Gemm | None:
        return {"fwd": self.fwd, "dgrad": self.dgrad, "wgrad": self.wgrad}[direction]


_ROW = Operand(Granularity.ROW)
_TENSOR = Operand(Granularity.TENSOR)
_GROUP = Operand(Granularity.GROUP)
_BLOCK = Operand(Granularity.BLOCK)
#: Gradients span more decades than activations. One scale for a whole gradient tensor flushes its
#: small rows in e4m3 (half of them at a row spread of e^4) and almost none in e5m2.
_TENSOR_GRAD = Operand(Granularity.TENSOR, dtype=E5M2)

TENSORWISE = Recipe(
    "tensorwise",
    fwd=Gemm(_TENSOR, _TENSOR, fast_accum=True),
    dgrad=Gemm(_TENSOR_GRAD, _TENSOR),
    wgrad=Gemm(_TENSOR_GRAD, _TENSOR),
)
#: For libraries that take no e5m2: the accuracy gate sees what it does to the gradients.
TENSORWISE_E4M3 = Recipe(
    "tensorwise_e4m3",
    fwd=Gemm(_TENSOR, _TENSOR, fast_accum=True),
    dgrad=Gemm(_TENSOR, _TENSOR),
    wgrad=Gemm(_TENSOR, _TENSOR),
)
ROWWISE = Recipe(
    "rowwise",
    fwd=Gemm(_ROW, _ROW, fast_accum=True),
    dgrad=Gemm(_ROW, _ROW),
    wgrad=Gemm(_ROW, _ROW),
)
#: Fast accumulation in the backward too. Its error grows with the contraction (1e-3 at 4096) and
#: stays far below that of the operands.
ROWWISE_FAST = Recipe(
    "rowwise_fast",
    fwd=Gemm(_ROW, _ROW, fast_accum=True),
    dgrad=Gemm(_ROW, _ROW, fast_accum=True),
    wgrad=Gemm(_ROW, _ROW, fast_accum=True),
)
#: Slow accumulation in the forward too, for very long contractions.
ROWWISE_SLOW = Recipe(
    "rowwise_slow",
    fwd=Gemm(_ROW, _ROW),
    dgrad=Gemm(_ROW, _ROW),
    wgrad=Gemm(_ROW, _ROW),
)
#: TorchAO's third set: its dgrad takes the weight with one scale, its wgrad stays high.
ROWWISE_WITH_GW_HP = Recipe(
    "rowwise_with_gw_hp",
    fwd=Gemm(_ROW, _ROW, fast_accum=True),
    dgrad=Gemm(_ROW, _TENSOR),
    wgrad=None,
)
#: Activations and gradients 1 x 128, weights 128 x 128; in wgrad both operands are activations.
BLOCKWISE = Recipe(
    "blockwise",
    fwd=Gemm(_GROUP, _BLOCK),
    dgrad=Gemm(_GROUP, _BLOCK),
    wgrad=Gemm(_GROUP, _GROUP),
)
#: For kernels that know 128 x 128 on the second operand only: the wgrad's x is scaled so too.
GROUPWISE = Recipe(
    "groupwise",
    fwd=Gemm(_GROUP, _BLOCK),
    dgrad=Gemm(_GROUP, _BLOCK),
    wgrad=Gemm(_GROUP, _BLOCK),
)
#: 128 x 128 on both sides: 128 rows of a batch share a scale.
BLOCKWISE_128X128 = Recipe(
    "blockwise_128x128",
    fwd=Gemm(_BLOCK, _BLOCK),
    dgrad=Gemm(_BLOCK, _BLOCK),
    wgrad=Gemm(_BLOCK, _BLOCK),
)
#: For float32 only. Not an FP8 recipe: nothing is scaled.
_CAST = Operand(Granularity.NONE, dtype=torch.bfloat16)
BF16 = Recipe("plain", fwd=Gemm(_CAST, _CAST), dgrad=Gemm(_CAST, _CAST), wgrad=Gemm(_CAST, _CAST))
