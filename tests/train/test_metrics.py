"""Metrics against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loka_compile.train.metrics import Metrics
from loka_compile.train.metrics import measure
from loka_compile.train.metrics import relative_percent
from loka_compile.train.metrics import windows


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def test_log_loss_ne_and_auc_by_hand() -> None:
    logits = np.array([logit(0.8), logit(0.4), logit(0.6), logit(0.1)], dtype=np.float32)
    labels = np.array([1, 1, 0, 0], dtype=np.float32)
    got = measure(logits, labels)
    loss = -(math.log(0.8) + math.log(0.4) + math.log(0.4) + math.log(0.9)) / 4
    assert got.log_loss == pytest.approx(loss, rel=1e-6)
    assert got.ne == pytest.approx(loss / math.log(2), rel=1e-6)
    assert got.auc == pytest.approx(3 / 4)  # of the 4 pairs, (0.4, 0.6) is the wrong way round
    assert (got.rows, got.non_finite) == (4, 0)


def test_predicting_the_rate_has_ne_one() -> None:
    labels = np.array([1, 0, 0, 0, 0] * 20, dtype=np.float32)
    assert measure(np.full(100, logit(0.2)), labels).ne == pytest.approx(1.0)


def test_a_tie_counts_half_in_auc() -> None:
    assert measure(np.zeros(2), np.array([0.0, 1.0])).auc == pytest.approx(0.5)


def test_confident_and_wrong_stays_finite_and_large() -> None:
    got = measure(np.array([1e4, -1e4], dtype=np.float32), np.array([0.0, 1.0]))
    assert got.log_loss is not None
    assert 25 < got.log_loss < 40


def test_one_logit_that_is_not_finite_is_not_averaged_away() -> None:
    got = measure(np.array([0.1, np.nan, np.inf]), np.array([0.0, 1.0, 1.0]))
    assert got == Metrics(None, None, None, 3, 2)


def test_one_class_has_a_loss_but_no_ne_and_no_auc() -> None:
    got = measure(np.zeros(3), np.ones(3))
    assert got.log_loss == pytest.approx(math.log(2))
    assert got.ne is None
    assert got.auc is None


def test_relative_log_loss_is_in_percent_and_positive_when_worse() -> None:
    def of(loss: float | None) -> Metrics:
        return Metrics(loss, None, None, 1, 0)

    assert relative_percent(of(0.505), of(0.5)) == pytest.approx(1.0)
    assert relative_percent(of(0.495), of(0.5)) == pytest.approx(-1.0)
    assert relative_percent(of(None), of(0.5)) is None


@pytest.mark.parametrize(("rows", "count"), [(100, 10), (101, 10), (7, 10), (1, 1), (59, 8)])
def test_windows_cover_every_row_once_in_nearly_equal_parts(rows: int, count: int) -> None:
    got = windows(rows, count)
    assert [i for a, b in got for i in range(a, b)] == list(range(rows))
    sizes = {b - a for a, b in got}
    assert max(sizes) - min(sizes) <= 1
    assert len(got) == min(rows, count)
