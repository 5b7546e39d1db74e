"""Histories: the rows before, and KuaiRand's recorded ones."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from loka_compile.data import DataError
from loka_compile.data import Schema
from loka_compile.data import Source
from loka_compile.data import open_source
from loka_compile.data.base import CategoricalField
from loka_compile.data.base import Chunk
from loka_compile.data.encode import RollingHistory


class Visits(Source):
    """User i % 3, page i + 1; two chunks."""

    name = "visits"
    schema = Schema((CategoricalField("user", 4), CategoricalField("page", 99)), (), "y")

    def _chunks(self) -> Iterator[Chunk]:
        for start in (0, 4):
            i = np.arange(start, start + 4)
            ids = np.stack([i % 3, i + 1], axis=1)
            yield Chunk(ids, np.zeros((4, 0), np.float32), np.zeros(4, np.float32))


def test_only_earlier_rows_of_the_same_key() -> None:
    source = Visits()
    source.attach_history(2, ("user", "page"))
    assert source.schema.history is not None and source.schema.history.length == 2
    for _ in range(2):  # a second pass starts afresh
        batches = list(source.batches(3))
        got = np.concatenate([b.history.numpy() for b in batches])
        # Key 0 stands for an unknown user: no past.
        want = [[0, 0], [0, 0], [0, 0], [0, 0], [0, 2], [0, 3], [0, 0], [2, 5]]
        assert got.tolist() == want


def test_a_full_history_keeps_the_newest() -> None:
    history = RollingHistory(2)
    out = history(np.array([1, 1, 1, 1]), np.array([7, 0, 8, 9]))
    assert out.tolist() == [[0, 0], [0, 7], [0, 7], [7, 8]]


def test_unknown_fields_are_named() -> None:
    with pytest.raises(DataError, match="no id field 'who'; id fields: user, page"):
        Visits().attach_history(2, ("who", "page"))
    with pytest.raises(DataError, match="name two of its id fields"):
        Visits().attach_history()


@pytest.mark.skipif("LOKA_DATA" not in os.environ, reason="LOKA_DATA names no folder")
def test_the_recorded_histories_of_kuairand() -> None:
    source = open_source(f"kuairand:{os.environ['LOKA_DATA']}")
    source.attach_history(20)
    batch = next(source.batches(4096, limit=4096))
    assert batch.history is not None and batch.history.shape == (4096, 20)
    known = batch.history > 0
    assert known.any(1).float().mean() > 0.9
    # Newest last: where anything is known, the last place is.
    assert bool((known.any(1) == known[:, -1]).all())
    assert int(batch.history.max()) < source.schema.cardinalities[1]
