"""Encoders that work on a stream: nothing here looks at rows that have not arrived yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CLIP = 5.0
#: ``standard``: log counts, standardised and clipped. ``log``: log counts as they are. ``raw``: the
#: counts themselves, seven decades of them, which is what stresses a low-precision format.
DENSE_FORMS = ("standard", "log", "raw")
RAW_FORMS = ("log", "raw")
MISSING = frozenset({"", "NA", "nan", "None"})


@dataclass(frozen=True, eq=False)
class Standardiser:
    """``(x - mean) / std`` per column, clipped at +-5; missing values become 0, the mean."""

    mean: np.ndarray  # float64 [n_dense]
    std: np.ndarray  # float64 [n_dense]

    @classmethod
    def fit(cls, rows: np.ndarray) -> Standardiser:
        """Statistics of ``rows`` ``[n, n_dense]``; NaN entries are left out."""
        known = np.isfinite(rows)
        count = np.maximum(known.sum(axis=0), 1)
        values = np.where(known, rows, 0.0).astype(np.float64)
        mean = values.sum(axis=0) / count
        centred = np.where(known, values - mean, 0.0)
        std = np.sqrt((centred**2).sum(axis=0) / count)
        # A column that is constant so far carries no scale; 1 keeps later changes finite.
        return cls(mean, np.where(std > 1e-6, std, 1.0))

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """float ``[n, n_dense]`` -> float32 of the same shape, finite."""
        scaled = np.clip((rows - self.mean) / self.std, -CLIP, CLIP)
        return np.nan_to_num(scaled, nan=0.0).astype(np.float32)


class Vocabulary:
    """Ids 1, 2, ... in order of first sight, up to ``cardinality - 1``; 0 for missing or full."""

    def __init__(self, cardinality: int) -> None:
        self.cardinality = cardinality
        self.overflow = 0
        self._ids: dict[str, int] = {}

    def encode(self, values: Sequence[str]) -> np.ndarray:
        """int64 ``[n]`` for ``n`` strings."""
        out = np.zeros(len(values), dtype=np.int64)
        ids = self._ids
        for i, value in enumerate(values):
            if value in MISSING:
                continue
            known = ids.get(value)
            if known is None:
                if len(ids) + 1 >= self.cardinality:
                    self.overflow += 1
                    continue
                known = ids[value] = len(ids) + 1
            out[i] = known
        return out


def log1p(values: np.ndarray) -> np.ndarray:
    """log(1 + x) in float32, negative counts as 0, NaN kept."""
    return np.log1p(np.maximum(values.astype(np.float64), 0.0)).astype(np.float32)


def counts(values: np.ndarray) -> np.ndarray:
    """The counts themselves in float32, negative counts as 0, NaN kept."""
    return np.maximum(values.astype(np.float64), 0.0).astype(np.float32)


def raw(values: np.ndarray) -> np.ndarray:
    """float ``[n, n_dense]`` -> float32, missing values 0; nothing scaled, nothing clipped."""
    return np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0).astype(np.float32)


class RollingHistory:
    """The last ``length`` items of each key, from the rows that went before."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._items: dict[int, deque[int]] = {}

    def __call__(self, keys: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Keys and items int64 ``[n]`` in time order -> int64 ``[n, length]``, newest last."""
        out = np.zeros((len(keys), self.length), dtype=np.int64)
        for i, (key, item) in enumerate(zip(keys.tolist(), items.tolist(), strict=True)):
            if key == 0:
                # An unknown key has no past.
                continue
            seen = self._items.get(key)
            if seen is None:
                seen = self._items[key] = deque(maxlen=self.length)
            elif seen:
                out[i, -len(seen) :] = seen
            if item:
                seen.append(item)
        return out
