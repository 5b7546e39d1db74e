"""``synthetic``: a click stream that never happened, whose true click probabilities are known.

A planted teacher: ids by Zipf's law, log-normal counts, a frozen factorisation model over the ids
and a small network over the counts give a logit that drifts slowly; labels are drawn from it. The
probability of every row is in ``Batch.truth``, so losses can be compared without label noise.
``synthetic:rows=1000000,seed=0`` (and ``fields``, ``dense``; ``tail=2`` doubles the spread of the
logarithms of all counts: the same clicks, seen through heavier tails).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from loka_compile.data.base import CategoricalField
from loka_compile.data.base import Chunk
from loka_compile.data.base import DataError
from loka_compile.data.base import OnBadRow
from loka_compile.data.base import Schema
from loka_compile.data.base import Source
from loka_compile.data.encode import DENSE_FORMS
from loka_compile.data.encode import counts
from loka_compile.data.encode import log1p

CHUNK_ROWS = 8_192
#: Of the ids' law; most click logs lie between 1 and 1.3.
ZIPF = 1.1
RATE, LOGIT_STD = 0.25, 1.3
WIDTH = 6
#: Rows in which the drift goes once round.
DRIFT_ROWS = 2_000_000
_MISSING = 0.01
_BOUNDS = {
    "rows": (1, 10_000_000_000),
    "seed": (0, 2**31),
    "fields": (2, 200),
    "dense": (1, 1000),
    "tail": (0, 8),
}


class Synthetic(Source):
    """The same rows for the same seed, in any run and of any length."""

    name = "synthetic"
    synthetic = True
    history_fields = ("user", "item")
    dense_forms = DENSE_FORMS

    def __init__(
        self,
        rows: int = 1_000_000,
        seed: int = 0,
        fields: int = 26,
        dense: int = 13,
        tail: float = 1.0,
        on_bad_row: OnBadRow = "error",
        dense_form: str = "standard",
    ) -> None:
        super().__init__(on_bad_row, dense_form)
        given = {"rows": rows, "seed": seed, "fields": fields, "dense": dense, "tail": tail}
        for name, value in given.items():
            low, high = _BOUNDS[name]
            if not low <= value <= high:
                raise DataError(f"synthetic: {name} is {value}; use {low} to {high}")
        self.rows, self.seed, self.tail = rows, seed, tail
        r = np.random.default_rng([seed, 1])
        # From a handful of values to tens of thousands, users and items largest.
        sizes = [50_000, 20_000, *np.geomspace(8, 20_000, fields - 2).astype(int).tolist()]
        names = ["user", "item", *(f"c{i}" for i in range(2, fields))]
        self.schema = Schema(
            tuple(CategoricalField(n, int(s)) for n, s in zip(names, sizes, strict=True)),
            tuple(f"count{i}" for i in range(dense)),
            "click",
        )
        self._cdf = [_zipf(size - 1) for size in sizes]
        self._vectors = [r.normal(size=(s, WIDTH)).astype(np.float32) for s in sizes]
        self._weights = [r.normal(size=s).astype(np.float32) for s in sizes]
        self._middle, self._spread = r.uniform(0, 6, dense), r.uniform(0.8, 2.5, dense)
        self._hidden = r.normal(size=(dense, 16)) / dense**0.5
        self._out = r.normal(size=16) / 4.0
        self._drift = r.normal(size=(2, 16)) / 4.0
        self._scale, self._shift = 1.0, 0.0
        first = self._logit(*self._inputs(0), np.arange(CHUNK_ROWS))
        self._scale = LOGIT_STD / float(first.std())
        self._shift = float(np.log(RATE / (1 - RATE)) - self._scale * first.mean())

    def _inputs(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids int64 ``[n, fields]`` and standard normal values ``[n, dense]`` behind the counts."""
        r = np.random.default_rng([self.seed, 2, chunk])
        draws = r.random((len(self._cdf), CHUNK_ROWS))
        ids = np.stack(
            [np.searchsorted(c, u) + 1 for c, u in zip(self._cdf, draws, strict=True)], axis=1
        )
        ids[r.random(ids.shape) < _MISSING] = 0
        return ids, r.normal(size=(CHUNK_ROWS, len(self._middle)))

    def _logit(self, ids: np.ndarray, normal: np.ndarray, row: np.ndarray) -> np.ndarray:
        columns = range(ids.shape[1])
        vectors = np.stack([self._vectors[f][ids[:, f]] for f in columns])
        linear = sum(self._weights[f][ids[:, f]] for f in columns) / len(columns) ** 0.5
        pairs = (vectors.sum(0) ** 2 - (vectors**2).sum(0)).sum(-1) / (len(columns) * WIDTH**0.5)
        angle = 2 * np.pi * row / DRIFT_ROWS
        drifting = np.stack([np.sin(angle), np.cos(angle)], axis=1) @ self._drift
        dense = (np.tanh(normal @ self._hidden) * (self._out + drifting)).sum(-1)
        return self._shift + self._scale * (linear + pairs + 2 * dense)

    def _chunks(self) -> Iterator[Chunk]:
        assert self.rows is not None
        form = counts if self.dense_form == "raw" else log1p
        for start in range(0, self.rows, CHUNK_ROWS):
            chunk = start // CHUNK_ROWS
            ids, normal = self._inputs(chunk)
            logit = self._logit(ids, normal, np.arange(start, start + CHUNK_ROWS))
            truth = 1.0 / (1.0 + np.exp(-logit))
            draw = np.random.default_rng([self.seed, 3, chunk]).random(CHUNK_ROWS)
            values = np.floor(np.exp(self._middle + self.tail * self._spread * normal))
            rows = Chunk(
                ids,
                form(values),
                (draw < truth).astype(np.float32),
                truth=truth.astype(np.float32),
            ).cut(0, min(CHUNK_ROWS, self.rows - start))
            self.counts.read += len(rows)
            yield rows


def _zipf(n: int) -> np.ndarray:
    """Cumulative probabilities of ranks 1..n."""
    weights = np.arange(1, n + 1, dtype=np.float64) ** -ZIPF
    cdf = np.cumsum(weights)
    return cdf[:-1] / cdf[-1]
