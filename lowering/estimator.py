"""Latency where no row is: roofline terms and wave quantisation, fitted to a kernel's rows.

    t = c0 + c1 * waves(rows, columns, contraction) + c2 * results + c3 * operands      [us]

with c >= 0 by non-negative least squares on relative errors. waves counts the rounds in which the
SMs work off the output tiles, times the contraction; results and operands are element counts, which
stand for memory traffic and for quantising. The tile, and whether few tiles are split along the
contraction, are the ones that predict left-out shapes best. What the formula misses is then
corrected by the residuals of shapes nearby (in octaves).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loka_compile.lowering.cost_table import CostRow

#: (rows, columns) of an output tile; None: no quantisation into tiles.
TILES: tuple[tuple[int, int] | None, ...] = (
    None,
    (64, 128),
    (64, 256),
    (128, 128),
    (128, 256),
    (256, 128),
)
SPLITS = (1, 2, 4, 8, 16)
#: Octaves over which a residual is believed, and the weight of "the formula is right".
WIDTH = 1.0
PRIOR = 0.5
#: Fewer rows than this fit nothing.
LEAST_ROWS = 6

Array = np.ndarray[Any, np.dtype[np.float64]]


def product_of(direction: str, m: int, k: int, n: int) -> tuple[int, int, int]:
    """(rows, columns, contraction) of a linear's GEMM in this direction.

    A part that only moves memory (`parts.MEMORY_BOUND`) contracts over nothing.
    """
    gemms = {"fwd": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}
    return gemms.get(direction, (m, max(k, n), 0))


def waves(products: Array, tile: tuple[int, int] | None, sms: int, split: bool) -> Array:
    """Multiply-adds in a row on the busiest SM, for products (rows, columns, contraction)."""
    rows, columns, contraction = products.T
    if tile is None:
        return rows * columns * contraction / sms
    tiles = np.ceil(rows / tile[0]) * np.ceil(columns / tile[1])
    size = tile[0] * tile[1] * contraction
    rounds = [np.ceil(tiles * s / sms) / s for s in (SPLITS if split else (1,))]
    return np.minimum.reduce(rounds) * size


@dataclass(frozen=True)
class Fit:
    """A fitted kernel: `predict` gives microseconds."""

    tile: tuple[int, int] | None
    split: bool
    sms: int
    coefficients: Array
    products: Array
    residuals: Array

    def predict(self, rows: int, columns: int, contraction: int) -> float:
        one = np.array([[rows, columns, contraction]], float)
        base = float((_terms(one, self.tile, self.sms, self.split) @ self.coefficients)[0])
        distance = np.log2(np.maximum(self.products, 1)) - np.log2(np.maximum(one, 1))
        weight = np.exp(-0.5 * (distance**2).sum(1) / WIDTH**2)
        correction = float(weight @ self.residuals / (PRIOR + weight.sum()))
        return max(base, 1e-3) * math.exp(correction)


def _terms(products: Array, tile: tuple[int, int] | None, sms: int, split: bool) -> Array:
    rows, columns, contraction = products.T
    # Scaled so that all coefficients are of the order of microseconds.
    return np.stack(
        [
            np.ones(len(products)),
            waves(products, tile, sms, split) * 1e-6,
            rows * columns * 1e-6,
            (rows + columns) * contraction * 1e-6,
        ],
        axis=1,
    )


def _solve(products: Array, us: Array, tile: tuple[int, int] | None, split: bool, sms: int) -> Fit:
    from scipy.optimize import nnls

    terms = _terms(products, tile, sms, split)
    coefficients, _ = nnls(terms / us[:, None], np.ones(len(us)))
    base = np.maximum(terms @ coefficients, 1e-3)
    return Fit(tile, split, sms, coefficients, products, np.log(us / base))


def left_out(
    products: Array, us: Array, tile: tuple[int, int] | None, split: bool, sms: int
) -> Array:
    """Prediction of each row by a fit to all others."""
    found = []
    for i in range(len(us)):
        rest = np.arange(len(us)) != i
        fit = _solve(products[rest], us[rest], tile, split, sms)
        found.append(fit.predict(*products[i]))
    return np.array(found)


def fit(products: Sequence[tuple[int, int, int]], us: Sequence[float], sms: int) -> Fit | None:
    """The form that predicts left-out rows best, fitted to all; None with too few rows."""
    if len(us) < LEAST_ROWS:
        return None
    a, t = np.array(products, float), np.array(us, float)
    forms = [(tile, split) for tile in TILES for split in (False, True) if tile or not split]

    def error(form: tuple[tuple[int, int] | None, bool]) -> float:
        return float(np.median(np.abs(left_out(a, t, *form, sms) / t - 1)))

    return _solve(a, t, *min(forms, key=error), sms)


def fit_rows(rows: Sequence[CostRow], sms: int) -> Fit | None:
    """Fit rows of one family (`CostKey.family`). Rows that hold come before stale ones."""
    holding = [r for r in rows if r.why_stale() is None]
    used = holding if len(holding) >= LEAST_ROWS else rows
    newest = {(r.key.m, r.key.k, r.key.n): r for r in sorted(used, key=lambda r: r.date)}
    chosen = list(newest.values())
    products = [product_of(r.key.direction, r.key.m, r.key.k, r.key.n) for r in chosen]
    return fit(products, [r.us for r in chosen], sms)
