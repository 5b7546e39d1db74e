"""What every data source gives: a schema, counts of what was left out, and time-ordered batches.

A source implements ``_chunks`` (encoded rows in time order, dense values raw). Everything that must
be the same for all sources happens here: standardising, cutting batches, the row limit, counting.
"""

from __future__ import annotations

from abc import ABC
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from typing import Literal

import numpy as np
import torch

from loka_compile.data.encode import Standardiser
from loka_compile.errors import LokaError

OnBadRow = Literal["error", "skip"]
STATS_ROWS = 20_000
_MAX_EXAMPLES = 5


class DataError(LokaError):
    """Data that is missing, malformed or unknown; the message names file, line and remedy."""


@dataclass(frozen=True)
class CategoricalField:
    """One id field. Ids lie in ``[0, cardinality)``; 0: missing, unknown or beyond the bound."""

    name: str
    cardinality: int


@dataclass(frozen=True)
class Schema:
    """Names and sizes of a source's columns, in the order in which batches hold them."""

    categorical: tuple[CategoricalField, ...]
    dense: tuple[str, ...]
    label: str

    @property
    def cardinalities(self) -> tuple[int, ...]:
        return tuple(f.cardinality for f in self.categorical)


@dataclass(frozen=True, eq=False)
class Batch:
    """Consecutive labelled rows in time order.

    categorical: int64 ``[B, n_cat]``; dense: float32 ``[B, n_dense]``, standardised, finite;
    label: float32 ``[B]`` of 0 and 1; start: offset of the first row among the labelled rows.
    """

    categorical: torch.Tensor
    dense: torch.Tensor
    label: torch.Tensor
    start: int

    def __len__(self) -> int:
        return self.label.shape[0]


@dataclass(eq=False)
class Chunk:
    """What a reader hands to ``Source``: encoded ids, raw dense values (NaN = missing), labels."""

    categorical: np.ndarray  # int64 [n, n_cat]
    dense: np.ndarray  # float32 [n, n_dense]
    label: np.ndarray  # float32 [n]

    def __len__(self) -> int:
        return len(self.label)

    def cut(self, start: int, stop: int) -> Chunk:
        return Chunk(self.categorical[start:stop], self.dense[start:stop], self.label[start:stop])

    @staticmethod
    def join(parts: list[Chunk]) -> Chunk:
        if len(parts) == 1:
            return parts[0]
        return Chunk(
            np.concatenate([p.categorical for p in parts]),
            np.concatenate([p.dense for p in parts]),
            np.concatenate([p.label for p in parts]),
        )


@dataclass
class RowCounts:
    """Where the rows of the latest pass went.

    ``read = emitted + unlabelled + bad`` plus what lay beyond the limit or was read ahead.
    """

    read: int = 0
    emitted: int = 0
    unlabelled: int = 0
    bad: int = 0
    overflow: int = 0  # id values mapped to 0 because a vocabulary was full
    bad_examples: list[str] = field(default_factory=list)

    def summary(self) -> str:
        text = (
            f"{self.emitted:,} rows used of {self.read:,} read; "
            f"{self.unlabelled:,} unlabelled, {self.bad:,} malformed"
        )
        if self.bad_examples:
            text += f" (first: {self.bad_examples[0]})"
        return text


class Source(ABC):
    """A time-ordered, streamed table for binary prediction.

    ``rows`` is the number of labelled rows where it is known before reading, else None. ``counts``
    describes the latest pass over ``batches`` and is complete once that pass has ended. With
    ``on_bad_row="skip"`` malformed rows are counted there instead of raising ``DataError``.
    """

    name: str
    schema: Schema
    rows: int | None = None

    def __init__(self, on_bad_row: OnBadRow = "error") -> None:
        if on_bad_row not in ("error", "skip"):
            raise DataError(f"on_bad_row is {on_bad_row!r}; use 'error' or 'skip'")
        self.on_bad_row = on_bad_row
        self.counts = RowCounts()

    @abstractmethod
    def _chunks(self) -> Iterator[Chunk]:
        """Encoded, labelled rows in time order, a bounded number at a time."""

    def bad_row(self, message: str) -> None:
        """Raise for a malformed row, or count it, as ``on_bad_row`` says."""
        if self.on_bad_row == "error":
            raise DataError(f"{message}. Repair the file, or skip such rows: on_bad_row='skip'")
        self.counts.bad += 1
        if len(self.counts.bad_examples) < _MAX_EXAMPLES:
            self.counts.bad_examples.append(message)

    def batches(self, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """Batches of ``batch_size`` rows (the last may be smaller), at most ``limit`` rows in all.

        Dense statistics come from the first 20,000 labelled rows whatever the limit, so a row has
        the same values in a short and in a long run, and nothing later than those rows is used.
        """
        if batch_size < 1:
            raise DataError(f"batch_size is {batch_size}; it must be at least 1")
        if limit is not None and limit < 1:
            raise DataError(f"limit is {limit}; it must be at least 1 row (leave it out for all)")
        self.counts = RowCounts()
        return self._cut(batch_size, limit)

    def _cut(self, batch_size: int, limit: int | None) -> Iterator[Batch]:
        held: list[Chunk] = []
        n_held = 0
        for chunk in self._standardised():
            held.append(chunk)
            n_held += len(chunk)
            room = n_held if limit is None else min(n_held, limit - self.counts.emitted)
            last = limit is not None and n_held >= limit - self.counts.emitted
            if room < batch_size and not last:
                continue
            rows = Chunk.join(held)
            stop = room if last else room - room % batch_size
            for start in range(0, stop, batch_size):
                yield self._emit(rows.cut(start, min(start + batch_size, stop)))
            if last:
                return
            held = [rows.cut(stop, n_held)]
            n_held -= stop
        if n_held:
            yield self._emit(Chunk.join(held))

    def _emit(self, rows: Chunk) -> Batch:
        batch = Batch(
            _tensor(rows.categorical, np.int64),
            _tensor(rows.dense, np.float32),
            _tensor(rows.label, np.float32),
            self.counts.emitted,
        )
        self.counts.emitted += len(batch)
        return batch

    def _standardised(self) -> Iterator[Chunk]:
        """Hold back the first rows until the statistics are known, then pass chunks through."""
        held: list[Chunk] = []
        scale: Standardiser | None = None
        for chunk in self._chunks():
            if scale is None:
                held.append(chunk)
                if sum(map(len, held)) < STATS_ROWS:
                    continue
                chunk = Chunk.join(held)
                scale = Standardiser.fit(chunk.dense[:STATS_ROWS])
            yield Chunk(chunk.categorical, scale(chunk.dense), chunk.label)
        if scale is None and held:
            chunk = Chunk.join(held)
            yield Chunk(chunk.categorical, Standardiser.fit(chunk.dense)(chunk.dense), chunk.label)


def _tensor(values: np.ndarray, dtype: type) -> torch.Tensor:
    # Arrow hands out read-only memory, which a tensor must not share.
    return torch.from_numpy(np.require(values, dtype=dtype, requirements=["C", "W"]))
