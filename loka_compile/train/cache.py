"""Batches read once and shared by all arms."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator

import torch

from loka_compile.data.base import Batch
from loka_compile.data.base import DataError
from loka_compile.data.base import Source

#: Above this, batches are read again for every arm instead of being kept.
CACHE_BYTES = 4 << 30


class BatchCache(Iterable[Batch]):
    """Batches of a source, read once and kept while they fit, else read again on each pass."""

    def __init__(
        self, source: Source, batch: int, limit: int | None, max_bytes: int = CACHE_BYTES
    ) -> None:
        self._source, self._batch, self._limit = source, batch, limit
        self._max_bytes = max_bytes
        self._held: list[Batch] | None = []
        self.rows = 0

    def fill(self, on_rows: Callable[[int], None] = lambda n: None) -> None:
        """Read the source through once; afterwards ``rows`` is known."""
        size = 0
        for batch in self._source.batches(self._batch, self._limit):
            self.rows += len(batch)
            size += sum(t.nbytes for t in batch.tensors())
            if size > self._max_bytes:
                self._held = None
            if self._held is not None:
                self._held.append(batch)
            on_rows(self.rows)
        if self.rows == 0:
            raise DataError(f"{self._source.name} gave no labelled rows; check its files")

    def to(self, device: torch.device) -> None:
        """Keep the batches on ``device``, once for all passes; nothing where none are kept."""
        if self._held is not None:
            self._held = [batch.to(device) for batch in self._held]

    def __iter__(self) -> Iterator[Batch]:
        if self._held is not None:
            return iter(self._held)
        return self._source.batches(self._batch, self._limit)
