"""What a part is expected to cost before it was timed, and how far that may be off.

By a fit to the kernel's rows at other shapes (`estimator.py`). With a few rows only, which fit
nothing, a kernel is that much slower or faster than a like one that has a fit: than itself in bf16,
than torch's of the same scaling, than high precision. What moves memory goes by its bytes, scaled
to the rows that there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch

from loka_compile.lowering.cost_store import CostTable
from loka_compile.lowering.cost_table import CostKey
from loka_compile.lowering.cost_table import CostRow
from loka_compile.lowering.estimator import LEAST_ROWS
from loka_compile.lowering.estimator import Fit
from loka_compile.lowering.estimator import product_of
from loka_compile.lowering.libraries import LIBRARIES
from loka_compile.lowering.libraries.torch_scaled_mm import TorchScaledMM
from loka_compile.lowering.parts import GEMM
from loka_compile.lowering.parts import guess_us
from loka_compile.lowering.recipes import BLOCKWISE
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.recipes import ROWWISE
from loka_compile.lowering.recipes import TENSORWISE

#: A kernel may be so many times faster than expected: of left-out shapes nine in ten are within the
#: first by a fit to dozens of rows; what has few rows is believed less.
SLACK, FEW_SLACK = 1.15, 1.25
#: Rows from which on a kernel is compared with a like one, and a fit to so many is a good one.
LEAST_LIKE, MANY_ROWS = 1, 2 * LEAST_ROWS


@dataclass(frozen=True)
class Basis:
    """What a family of rows says: `fit`, times `ratio`; see `SLACK`."""

    fit: Fit
    ratio: float
    slack: float

    def us(self, key: CostKey) -> float:
        return self.ratio * self.fit.predict(*product_of(key.direction, key.m, key.k, key.n))


class Expected:
    """Expectations from the rows of `table`."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._gemms: dict[tuple[Any, ...], Basis | None] = {}
        self._scales: dict[tuple[Any, ...], float | None] = {}

    def forget(self) -> None:
        """Rows were added: something may be expected now of what had too few. What has a basis
        keeps it: a few rows more of dozens would move every price, to no end."""
        self._gemms = {f: basis for f, basis in self._gemms.items() if basis is not None}
        self._scales = {f: scale for f, scale in self._scales.items() if scale is not None}

    def gemm(self, key: CostKey) -> Basis | None:
        """Of a kernel alone; None where it has to be timed first."""
        family = key.family()
        if family not in self._gemms:
            self._gemms[family] = self._basis(key)
        return self._gemms[family]

    def wants(self, key: CostKey) -> int:
        """How many more rows of its family there must be, so that others need none."""
        like = any(self.table.fit(one) is not None for one in _likes(key))
        return max((LEAST_LIKE if like else LEAST_ROWS) - len(self.table.family(key)), 0)

    def _basis(self, key: CostKey) -> Basis | None:
        rows = self.table.family(key)
        own = self.table.fit(key)
        if own is not None:
            return Basis(own, 1.0, SLACK if len(rows) >= MANY_ROWS else FEW_SLACK)
        used = _holding(rows, LEAST_LIKE)
        if len(used) < LEAST_LIKE:
            return None
        for like in _likes(key):
            fit = self.table.fit(like)
            if fit is not None:
                said = Basis(fit, 1.0, FEW_SLACK)
                return replace(said, ratio=_ratio([(row.us, said.us(row.key)) for row in used]))
        return None

    def moved(self, key: CostKey, itemsize: int) -> float:
        """Microseconds of a part that moves memory."""
        fit = self.table.fit(key)
        if fit is not None:
            return fit.predict(*product_of(key.direction, key.m, key.k, key.n))
        return guess_us(key, itemsize) * (self.scale(key, itemsize) or 1.0)

    def scale(self, key: CostKey, itemsize: int) -> float | None:
        """What its rows take over what their bytes say; None without rows."""
        family = key.family()
        if family not in self._scales:
            rows = _holding(self.table.family(key), 1)
            pairs = [(row.us, guess_us(row.key, itemsize)) for row in rows]
            self._scales[family] = _ratio(pairs) if pairs else None
        return self._scales[family]


def _likes(key: CostKey) -> Iterator[CostKey]:
    """Kernels that behave like `key`'s over shapes, the best first."""
    if key.dtype != "bfloat16":
        yield replace(key, dtype="bfloat16")
    if key.recipe == HIGH_PRECISION:
        if key.layout != "nk":
            yield replace(key, layout="nk")
        return
    bare = replace(key, library="torch", version=torch.__version__, epilogue=GEMM, layout="nk")
    rule = LIBRARIES[key.library].recipes[key.recipe].gemm(key.direction)
    if rule is not None and rule.b.scaled:
        recipe = BLOCKWISE if rule.b.blocks else ROWWISE if rule.b.rows else TENSORWISE
        assert recipe.name in TorchScaledMM.recipes
        for dtype in dict.fromkeys((key.dtype, "bfloat16")):
            yield replace(bare, recipe=recipe.name, dtype=dtype)
    yield replace(bare, recipe=HIGH_PRECISION)


def _holding(rows: Sequence[CostRow], least: int) -> Sequence[CostRow]:
    """Rows of other versions count where there are too few of this one."""
    holding = [row for row in rows if row.why_stale() is None]
    return holding if len(holding) >= least else rows


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Geometric mean of measured over said."""
    return math.exp(sum(math.log(us / said) for us, said in pairs) / len(pairs))
