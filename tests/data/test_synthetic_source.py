"""The planted stream: repeatable, heavy-tailed, and its probabilities are true."""

from __future__ import annotations

import numpy as np
import pytest

from loka_compile.data import DataError
from loka_compile.data import open_source
from loka_compile.data.synthetic import CHUNK_ROWS
from loka_compile.train import metrics


def columns(spec: str, **how: str) -> tuple[np.ndarray, ...]:
    source = open_source(spec, **how)
    batches = list(source.batches(4096))
    names = ("categorical", "dense", "label", "truth")
    return tuple(np.concatenate([getattr(b, n).numpy() for b in batches]) for n in names)


def test_rows_do_not_depend_on_the_length() -> None:
    long, short = columns("synthetic:rows=30000,seed=5"), columns("synthetic:rows=21000,seed=5")
    for a, b in zip(long, short, strict=True):
        np.testing.assert_array_equal(a[:21000], b)
    other = columns("synthetic:rows=21000,seed=6")
    assert not np.array_equal(other[0], short[0])


def test_the_truth_is_true() -> None:
    _, _, label, truth = columns("synthetic:rows=200000")
    assert 0.2 < label.mean() < 0.35
    order = np.argsort(truth)
    for part in np.array_split(order, 10):
        # Four standard errors of 20,000 draws.
        assert abs(label[part].mean() - truth[part].mean()) < 4 * 0.5 / 20_000**0.5
    logit = np.log(truth / (1 - truth))
    m = metrics.measure(logit, label)
    assert m.log_loss == pytest.approx(metrics.expected_log_loss(logit, truth), abs=0.004)
    assert m.ne is not None and m.ne < 0.9


def test_ids_follow_zipf_and_counts_are_heavy_tailed() -> None:
    ids, raw, *_ = columns("synthetic:rows=40000", dense="raw")
    assert (ids[:, 0] == 1).mean() > 20 * (ids[:, 0] == 100).mean() > 0
    assert ids.min() == 0 and 0.005 < (ids == 0).mean() < 0.02
    assert raw.max() > 1e4 and raw.min() == 0.0
    assert np.array_equal(raw, np.floor(raw))
    _, logs, *_ = columns("synthetic:rows=40000", dense="log")
    np.testing.assert_allclose(logs, np.log1p(raw), rtol=1e-5, atol=1e-6)
    _, standard, *_ = columns("synthetic:rows=40000")
    assert np.abs(standard).max() <= 5.0


def test_a_heavier_tail_changes_the_counts_alone() -> None:
    """Counts ``exp(m + s z)`` become ``exp(m + 2 s z)``: the same ids, the same clicks."""
    plain, heavy = (columns(f"synthetic:rows=9000{t}", dense="log") for t in ("", ",tail=2"))
    for column in (0, 2, 3):
        np.testing.assert_array_equal(plain[column], heavy[column])
    great = plain[1] > 7  # the integer part that is cut off is small there
    spread = [x[1][great].std() for x in (plain, heavy)]
    assert spread[1] > 1.5 * spread[0]
    assert (columns("synthetic:rows=10,tail=0", dense="raw")[1].std(axis=0) == 0).all()


def test_sizes_and_label() -> None:
    source = open_source("synthetic:rows=10,fields=4,dense=2")
    assert source.synthetic and source.rows == 10
    assert [f.name for f in source.schema.categorical] == ["user", "item", "c2", "c3"]
    assert len(next(source.batches(99))) == 10
    assert CHUNK_ROWS > 10


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("synthetic:row=3", "does not know 'row=3'; write synthetic:rows="),
        ("synthetic:rows=x", "does not know 'rows=x'"),
        ("synthetic:rows=0", "rows is 0"),
        ("synthetic:fields=1", "fields is 1"),
        ("synthetic:tail=nan", "tail is nan; use 0 to 8"),
        ("synthetic:tail=fat", "does not know 'tail=fat'"),
    ],
)
def test_mistakes_are_named(spec: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_source(spec)
    with pytest.raises(DataError, match="no dense form 'rare'; it has standard, log, raw"):
        open_source("synthetic", dense="rare")
