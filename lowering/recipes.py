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

import torch

DIRECTIONS = ("fwd", "dgrad", "wgrad")

#: Name of the kernel that leaves a GEMM in the precision the model was written in.
HIGH_PRECISION = "high_precision"

#: A kernel name with this suffix runs the same arithmetic in software.
EMULATED = "+emulated"

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


@dataclass(frozen=True)
class Operand:
    """One operand's rule: `rows` is True for one scale per row, False for one per tensor."""

    rows: bool
    dtype: torch.dtype = E4M3


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


_ROW = Operand(rows=True)
_TENSOR = Operand(rows=False)
#: Gradients span more decades than activations. One scale for a whole gradient tensor flushes its
#: small rows in e4m3 (half of them at a row spread of e^4) and almost none in e5m2.
_TENSOR_GRAD = Operand(rows=False, dtype=E5M2)

TENSORWISE = Recipe(
    "tensorwise",
    fwd=Gemm(_TENSOR, _TENSOR, fast_accum=True),
    dgrad=Gemm(_TENSOR_GRAD, _TENSOR),
    wgrad=Gemm(_TENSOR_GRAD, _TENSOR),
)
ROWWISE = Recipe(
    "rowwise",
    fwd=Gemm(_ROW, _ROW, fast_accum=True),
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
