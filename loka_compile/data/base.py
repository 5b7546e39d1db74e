"""What every data source gives: a schema, counts of what was left out, and time-ordered batches.

A source implements ``_chunks`` (encoded rows in time order, dense values raw). Everything that must
be the same for all sources happens here: standardising, cutting batches, the row limit, counting.
"""

from __future__ import annotations

from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from dataclasses import fields
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from loka_compile.data.encode import RAW_FORMS
from loka_compile.data.encode import RollingHistory
from loka_compile.data.encode import Standardiser
from loka_compile.data.encode import raw
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
class HistoryField:
    """``length`` earlier ids of the categorical field ``field``, newest last, 0 where none."""

    field: str
    length: int


@dataclass(frozen=True)
class Schema:
    """Names and sizes of a source's columns, in the order in which batches hold them."""

    categorical: tuple[CategoricalField, ...]
    dense: tuple[str, ...]
    label: str
    history: HistoryField | None = None

    def index(self, field: str) -> int:
        """Position of a categorical field; DataError for an unknown name."""
        names = [f.name for f in self.categorical]
        if field not in names:
            raise DataError(f"no id field {field!r}; id fields: {', '.join(names)}")
        return names.index(field)

    @property
    def cardinalities(self) -> tuple[int, ...]:
        return tuple(f.cardinality for f in self.categorical)


@dataclass(frozen=True, eq=False)
class Batch:
    """Consecutive labelled rows in time order.

    categorical: int64 ``[B, n_cat]``; dense: float32 ``[B, n_dense]``, standardised, finite;
    label: float32 ``[B]`` of 0 and 1; start: offset of the first row among the labelled rows;
    history: int64 ``[B, T]`` where the schema has one; truth: float32 ``[B]``, the probability the
    label was drawn with, where the source knows it.
    """

    categorical: torch.Tensor
    dense: torch.Tensor
    label: torch.Tensor
    start: int
    history: torch.Tensor | None = None
    truth: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        every = (self.categorical, self.dense, self.label, self.history, self.truth)
        return tuple(t for t in every if t is not None)

    def to(self, device: torch.device) -> Batch:
        def move(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if t is None else t.to(device, non_blocking=True)

        return Batch(
            self.categorical.to(device, non_blocking=True),
            self.dense.to(device, non_blocking=True),
            self.label.to(device, non_blocking=True),
            self.start,
            move(self.history),
            move(self.truth),
        )

    def __len__(self) -> int:
        return self.label.shape[0]


@dataclass(eq=False)
class Chunk:
    """What a reader hands to ``Source``: encoded ids, raw dense values (NaN = missing), labels."""

    categorical: np.ndarray  # int64 [n, n_cat]
    dense: np.ndarray  # float32 [n, n_dense]
    label: np.ndarray  # float32 [n]
    history: np.ndarray | None = None  # int64 [n, T]
    truth: np.ndarray | None = None  # float32 [n], in 0..1

    def __len__(self) -> int:
        return len(self.label)

    def cut(self, start: int, stop: int) -> Chunk:
        return self._map(lambda name: getattr(self, name)[start:stop])

    def _map(self, column: Callable[[str], np.ndarray]) -> Chunk:
        """A chunk of ``column(name)`` for every column that is there."""
        given = {f.name for f in fields(self) if getattr(self, f.name) is not None}
        return Chunk(**{name: column(name) for name in given})

    @staticmethod
    def join(parts: list[Chunk]) -> Chunk:
        if len(parts) == 1:
            return parts[0]
        return parts[0]._map(lambda name: np.concatenate([getattr(p, name) for p in parts]))


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
    #: True where no row ever happened; said wherever results of it are shown.
    synthetic: bool = False
    #: (key field, item field) of the history that ``attach_history`` makes by default.
    history_fields: tuple[str, str] | None = None
    #: Forms of the dense values that ``dense_form`` may take here.
    dense_forms: tuple[str, ...] = ("standard",)

    def __init__(self, on_bad_row: OnBadRow = "error", dense_form: str = "standard") -> None:
        if dense_form not in self.dense_forms:
            known = ", ".join(self.dense_forms)
            raise DataError(f"{self.name} has no dense form {dense_form!r}; it has {known}")
        self.dense_form = dense_form
        self._rolling: tuple[int, int, int] | None = None
        if on_bad_row not in ("error", "skip"):
            raise DataError(f"on_bad_row is {on_bad_row!r}; use 'error' or 'skip'")
        self.on_bad_row = on_bad_row
        self.counts = RowCounts()

    @abstractmethod
    def _chunks(self) -> Iterator[Chunk]:
        """Encoded, labelled rows in time order, a bounded number at a time."""

    def attach_history(self, length: int = 50, key_and_item: tuple[str, str] | None = None) -> None:
        """Give every row the last ``length`` items of its key, from the rows before it.

        key_and_item: two id fields; by default the source's own choice. A source that has
        recorded histories overrides this.
        """
        chosen = key_and_item or self.history_fields
        if chosen is None:
            raise DataError(f"{self.name} has no history of its own; name two of its id fields")
        key, item = (self.schema.index(name) for name in chosen)
        self._rolling = (key, item, length)
        self.schema = replace(self.schema, history=HistoryField(chosen[1], length))

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
            None if rows.history is None else _tensor(rows.history, np.int64),
            None if rows.truth is None else _tensor(rows.truth, np.float32),
        )
        self.counts.emitted += len(batch)
        return batch

    def _standardised(self) -> Iterator[Chunk]:
        """Hold back the first rows until the statistics are known, then pass chunks through."""
        held: list[Chunk] = []
        scale: Standardiser | None = None
        for chunk in self._with_history():
            if self.dense_form in RAW_FORMS:
                yield replace(chunk, dense=raw(chunk.dense))
                continue
            if scale is None:
                held.append(chunk)
                if sum(map(len, held)) < STATS_ROWS:
                    continue
                chunk = Chunk.join(held)
                scale = Standardiser.fit(chunk.dense[:STATS_ROWS])
            yield replace(chunk, dense=scale(chunk.dense))
        if scale is None and held:
            chunk = Chunk.join(held)
            yield replace(chunk, dense=Standardiser.fit(chunk.dense)(chunk.dense))

    def _with_history(self) -> Iterator[Chunk]:
        if self._rolling is None:
            yield from self._chunks()
            return
        key, item, length = self._rolling
        histories = RollingHistory(length)
        for chunk in self._chunks():
            made = histories(chunk.categorical[:, key], chunk.categorical[:, item])
            yield replace(chunk, history=made)


def _tensor(values: np.ndarray, dtype: type) -> torch.Tensor:
    # Arrow hands out read-only memory, which a tensor must not share.
    return torch.from_numpy(np.require(values, dtype=dtype, requirements=["C", "W"]))
