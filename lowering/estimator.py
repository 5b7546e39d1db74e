"""Latency where no row is: roofline terms and wave quantisation, fitted to a kernel's rows.

    t = c0 + c1 * waves(rows, columns, contraction) + c2 * results + c3 * operands
      + c4 * (results + operands, of sizes that are no multiple of 16)              [us]

with c >= 0 by non-negative least squares on relative errors, in which far outliers count less.
waves counts the rounds in which the SMs work off the output tiles, times the contraction; results
and operands are element counts, which stand for memory traffic and for quantising; sizes that
kernels cannot read as they are get padded. What the formula misses is corrected by the residuals of
shapes nearby (in octaves).

The tile, and whether few tiles are split along the contraction, are not known, and a library may
choose among several: the forms that predict left-out shapes best speak together, by their mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loka_compile.lowering.cost_table import CostRow
from loka_compile.lowering.libraries.base import ALIGNMENT

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
#: The most forms whose mean is taken: the one that looks best alone is often so by chance. A form
#: whose error is so many times the best one's does not speak.
SPEAKERS = 3
TOO_FAR = 1.5
#: Rounds of reweighting, and the deviation, in medians, from which a row counts less.
ROUNDS = 6
FAR = 1.5
#: Deviations below this are no outliers: what repeated measurements differ by.
NOISE = 0.02
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
class Form:
    """One reading of how a kernel tiles its result, and what follows of the rows."""

    tile: tuple[int, int] | None
    split: bool
    sms: int
    coefficients: Array
    products: Array
    residuals: Array

    def log_us(self, product: Array) -> float:
        """product: (1, 3)."""
        base = float((_terms(product, self.tile, self.split, self.sms) @ self.coefficients)[0])
        distance = np.log2(np.maximum(self.products, 1)) - np.log2(np.maximum(product, 1))
        weight = np.exp(-0.5 * (distance**2).sum(1) / WIDTH**2)
        correction = float(weight @ self.residuals / (PRIOR + weight.sum()))
        return math.log(max(base, 1e-3)) + correction


@dataclass(frozen=True)
class Fit:
    """A fitted kernel: `predict` gives microseconds."""

    forms: tuple[Form, ...]

    def predict(self, rows: int, columns: int, contraction: int) -> float:
        one = np.array([[rows, columns, contraction]], float)
        return math.exp(sum(form.log_us(one) for form in self.forms) / len(self.forms))


def _terms(products: Array, tile: tuple[int, int] | None, split: bool, sms: int) -> Array:
    rows, columns, contraction = products.T
    results, operands = rows * columns, (rows + columns) * contraction
    odd = (products % ALIGNMENT != 0).any(1)
    # Scaled so that all coefficients are of the order of microseconds.
    return np.stack(
        [
            np.ones(len(products)),
            waves(products, tile, sms, split) * 1e-6,
            results * 1e-6,
            operands * 1e-6,
            odd * (results + operands) * 1e-6,
        ],
        axis=1,
    )


def _solve(
    products: Array,
    us: Array,
    tile: tuple[int, int] | None,
    split: bool,
    sms: int,
) -> Form:
    from scipy.optimize import nnls

    terms = _terms(products, tile, split, sms)
    weight = np.ones(len(us))
    for _ in range(ROUNDS):
        coefficients, _ = nnls(terms * (weight / us)[:, None], weight)
        residuals = np.log(us / np.maximum(terms @ coefficients, 1e-3))
        bar = max(FAR * float(np.median(np.abs(residuals))), NOISE)
        # Huber's: a row beyond the bar pulls no harder than one at the bar.
        weight = np.sqrt(np.minimum(1.0, bar / np.maximum(np.abs(residuals), 1e-9)))
    return Form(tile, split, sms, coefficients, products, residuals)


def left_out(form: Form) -> Array:
    """Logarithms of what `form` says of each of its rows, corrected by all others, over the truth.

    The formula itself has seen the row: it has five coefficients, and a fit without each row, for
    every form, would take half a second per kernel.
    """
    logs = np.log2(np.maximum(form.products, 1))
    distance = ((logs[:, None] - logs[None]) ** 2).sum(2)
    weight = np.exp(-0.5 * distance / WIDTH**2)
    np.fill_diagonal(weight, 0.0)
    return (weight @ form.residuals) / (PRIOR + weight.sum(1)) - form.residuals


def fit(products: Sequence[tuple[int, int, int]], us: Sequence[float], sms: int) -> Fit | None:
    """The forms that predict left-out rows best, fitted to all; None with too few rows."""
    if len(us) < LEAST_ROWS:
        return None
    a, t = np.array(products, float), np.array(us, float)
    forms = [
        _solve(a, t, tile, split, sms)
        for tile in TILES
        for split in (False, True)
        if tile or not split
    ]
    errors = [float(np.abs(left_out(form)).mean()) for form in forms]
    best = sorted(range(len(forms)), key=errors.__getitem__)[:SPEAKERS]
    return Fit(tuple(forms[i] for i in best if errors[i] <= TOO_FAR * errors[best[0]]))


def fit_rows(rows: Sequence[CostRow], sms: int) -> Fit | None:
    """Fit rows of one family (`CostKey.family`). Rows that hold come before stale ones."""
    holding = [r for r in rows if r.why_stale() is None]
    used = holding if len(holding) >= LEAST_ROWS else rows
    newest = {(r.key.m, r.key.k, r.key.n): r for r in sorted(used, key=lambda r: r.date)}
    chosen = list(newest.values())
    products = [product_of(r.key.direction, r.key.m, r.key.k, r.key.n) for r in chosen]
    return fit(products, [r.us for r in chosen], sms)
