"""Batching, the row limit and standardising, on a source made of numbers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from loka_compile.data import DataError
from loka_compile.data import Schema
from loka_compile.data import Source
from loka_compile.data import base
from loka_compile.data import open_source
from loka_compile.data.base import CategoricalField
from loka_compile.data.base import Chunk
from loka_compile.data.encode import Standardiser
from loka_compile.data.encode import Vocabulary


class Numbers(Source):
    """Row i has id i % 7, dense value i (or ``values[i]``), label i % 2; chunks of odd sizes."""

    name = "numbers"
    schema = Schema((CategoricalField("id", 7),), ("x",), "y")

    def __init__(self, n: int, values: np.ndarray | None = None) -> None:
        super().__init__()
        self.values = np.arange(n) if values is None else values

    def _chunks(self) -> Iterator[Chunk]:
        for start in range(0, len(self.values), 37):
            i = np.arange(start, min(start + 37, len(self.values)))
            self.counts.read += len(i)
            yield Chunk((i % 7)[:, None], self.values[i][:, None].astype(np.float32), i % 2)


@pytest.mark.parametrize(
    ("rows", "batch", "limit"),
    [
        (100, 32, None),  # a smaller last batch
        (96, 32, None),  # none
        (100, 32, 70),  # a limit within a batch
        (100, 32, 64),  # a limit on a batch's edge
        (100, 1000, None),  # one batch for all
        (100, 10, 5),  # a limit below one batch
        (100, 32, 500),  # a limit beyond the end
        (5, 1, None),
    ],
)
def test_batches_hold_every_row_once_in_order(rows: int, batch: int, limit: int | None) -> None:
    source = Numbers(rows)
    got = list(source.batches(batch, limit))
    want = min(rows, limit or rows)
    ids = torch.cat([b.categorical[:, 0] for b in got])
    assert torch.equal(ids, torch.arange(want) % 7)
    assert [b.start for b in got] == list(range(0, want, batch))
    assert all(len(b) == batch for b in got[:-1])
    assert source.counts.emitted == want
    first = got[0]
    assert first.categorical.dtype == torch.int64
    assert first.dense.dtype == first.label.dtype == torch.float32


def test_statistics_come_from_the_first_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "STATS_ROWS", 50)
    values = np.arange(200.0)
    changed = values.copy()
    changed[50:] = 1e6
    a = torch.cat([b.dense for b in Numbers(200, values).batches(64)])
    b = torch.cat([b.dense for b in Numbers(200, changed).batches(64)])
    assert torch.equal(a[:50], b[:50])
    assert a[:50].mean().abs() < 1e-6
    assert a.max() == b.max() == 5.0


def test_a_limit_does_not_change_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "STATS_ROWS", 50)
    short = next(iter(Numbers(200).batches(10, limit=10)))
    long = next(iter(Numbers(200).batches(10)))
    assert torch.equal(short.dense, long.dense)


def test_a_source_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "STATS_ROWS", 50)
    source = Numbers(100_000)
    next(iter(source.batches(64)))
    assert source.counts.read < 200


def test_counts_start_again_on_every_pass() -> None:
    source = Numbers(100)
    for _ in range(2):
        list(source.batches(10))
        assert source.counts.emitted == source.counts.read == 100


def test_standardiser_leaves_gaps_at_the_mean_and_survives_a_constant() -> None:
    rows = np.array([[1.0, 4.0], [3.0, 4.0], [np.nan, 4.0]])
    got = Standardiser.fit(rows)(np.array([[1.0, 4.0], [np.nan, 5.0], [1e9, np.nan]]))
    np.testing.assert_allclose(got, [[-1.0, 0.0], [0.0, 1.0], [5.0, 0.0]])
    assert got.dtype == np.float32


def test_vocabulary_numbers_by_first_sight_and_counts_what_does_not_fit() -> None:
    ids = Vocabulary(3)
    assert ids.encode(["b", "NA", "a", "b", "", "c"]).tolist() == [1, 0, 2, 1, 0, 0]
    assert ids.encode(["a", "d"]).tolist() == [2, 0]
    assert ids.overflow == 2


@pytest.mark.parametrize("kwargs", [{"batch_size": 0}, {"batch_size": 4, "limit": 0}])
def test_senseless_sizes_are_refused_at_once(kwargs: dict[str, int]) -> None:
    with pytest.raises(DataError, match="at least 1"):
        Numbers(10).batches(**kwargs)


def test_unknown_source_names_the_nearest() -> None:
    with pytest.raises(DataError, match="did you mean 'flights'"):
        open_source("flihgts")
    with pytest.raises(DataError, match="did you mean 'kuairand:DIR'"):
        open_source("kuairant:/x")
    with pytest.raises(DataError, match="Known sources: criteo:FILE, flights, kuairand:DIR"):
        open_source("zzzz")


def test_a_wrong_bad_row_policy_is_refused() -> None:
    with pytest.raises(DataError, match="'error' or 'skip'"):
        open_source("flights", on_bad_row="ignore")
