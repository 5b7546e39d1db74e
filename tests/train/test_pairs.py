"""Pairing: known differences come out, nothing is mixed, what is missing is said."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from loka_compile.train import metrics
from loka_compile.train.loop import Trace
from loka_compile.train.loop import TrainError
from loka_compile.train.pairs import Pairing
from loka_compile.train.pairs import interval
from loka_compile.train.pairs import verdict

ROWS, STEP = 400, 40
CUTS = metrics.windows(ROWS, 4)


def trace(logit: float, swap: int | None = None, seed: int = 0, truth: bool = False) -> Trace:
    """Constant logits on labels of rate about one half; the plan holds from row ``swap`` on."""
    r = np.random.default_rng(seed)
    starts = np.arange(0, ROWS, STEP)
    active = np.zeros(len(starts), dtype=bool) if swap is None else starts >= swap
    labels = (r.random(ROWS) < 0.5).astype(np.float32)
    return Trace(
        np.full(ROWS, logit, dtype=np.float32),
        labels,
        starts,
        np.full(len(starts), STEP),
        np.ones(len(starts)),
        np.zeros(len(starts), dtype=bool),
        active,
        np.full(ROWS, 0.5, dtype=np.float32) if truth else None,
    )


def test_the_interval_is_students() -> None:
    values = [0.1, 0.3, -0.2, 0.05]
    half = stats.t.ppf(0.975, 3) * np.std(values, ddof=1) / 2
    assert interval(values) == pytest.approx((np.mean(values) - half, np.mean(values) + half))
    assert interval([1.0]) is None
    assert interval([0.5, 0.5]) == (0.5, 0.5)


def test_the_loss_of_each_pair_by_hand() -> None:
    pairing = Pairing("loka", "bf16_mods", CUTS, 0)
    for seed, logit in enumerate((0.1, 0.2, 0.3)):
        pairing.add(seed, trace(logit, 0, seed), trace(0.0, None, seed))
    got = pairing.result()
    for pair, logit in zip(got["pairs"], (0.1, 0.2, 0.3), strict=True):
        y = trace(0.0, None, pair["seed"]).labels
        want = 100 * (np.mean(np.logaddexp(0, logit) - y * logit) / np.log(2) - 1)
        assert pair["rll_percent"] == pytest.approx(want, rel=1e-5, abs=1e-5)
    values = [p["rll_percent"] for p in got["pairs"]]
    assert got["mean"] == pytest.approx(np.mean(values))
    assert got["ci95"] == pytest.approx(interval(values))
    assert len(got["window_upper95"]) == 4
    assert got["without_figure"] == 0


def test_rows_before_the_swap_are_not_judged() -> None:
    pairing = Pairing("loka", "bf16_mods", CUTS, 0)
    for seed in (0, 1):
        pairing.add(seed, trace(0.1, 120, seed), trace(0.0, None, seed))
    got = pairing.result()
    assert [w["plan_active"] for w in got["pairs"][0]["windows"]] == [False, False, True, True]
    assert [w is None for w in got["window_upper95"]] == [True, True, False, False]
    late = trace(0.0).labels[120:]
    want = 100 * (np.mean(np.logaddexp(0, 0.1) - late * 0.1) / np.log(2) - 1)
    # float32 holds 0.1 to seven digits.
    assert got["pairs"][0]["rll_percent"] == pytest.approx(want, rel=1e-5)


def test_an_arm_in_high_precision_is_judged_from_the_start() -> None:
    pairing = Pairing("bf16_mods", "original", CUTS, 100)
    for seed in (0, 1):
        pairing.add(seed, trace(0.1, None, seed), trace(0.0, None, seed))
    got = pairing.result()
    assert all(p["rll_percent"] is not None for p in got["pairs"])
    assert [w is None for w in got["window_upper95"]] == [True, False, False, False]


def test_the_expected_loss_has_no_label_noise() -> None:
    pairing = Pairing("loka", "bf16_mods", CUTS, 0)
    for seed in (0, 1):
        pairing.add(seed, trace(0.2, 0, seed, truth=True), trace(0.0, None, seed, truth=True))
    expected = pairing.result()["expected"]
    want = 100 * ((np.logaddexp(0, 0.2) - 0.1) / np.log(2) - 1)
    assert expected["mean"] == pytest.approx(want, rel=1e-5)
    assert expected["sd"] == pytest.approx(0.0, abs=1e-9)


def test_a_run_that_exploded_is_not_hidden() -> None:
    pairing = Pairing("loka", "bf16_mods", CUTS, 0)
    for seed, logit in enumerate((0.0, 0.0, float("nan"))):
        pairing.add(seed, trace(logit, 0, seed), trace(0.0, None, seed))
    got = pairing.result()
    assert got["without_figure"] == 1
    assert verdict(got, None)["passes"] is False
    assert "1 seeds gave no finite loss" in verdict(got, None)["why"]


def test_different_rows_are_refused() -> None:
    with pytest.raises(TrainError, match="saw different rows"):
        Pairing("loka", "bf16_mods", CUTS, 0).add(0, trace(0.0, 0, 1), trace(0.0, None, 2))


@pytest.mark.parametrize(
    ("upper", "window", "passes"),
    [(0.02, 0.03, True), (0.021, 0.0, False), (0.0, 0.031, False), (-0.5, None, False)],
)
def test_the_target(upper: float, window: float | None, passes: bool) -> None:
    found = {"ci95": [-1.0, upper], "window_upper95": [None, window], "without_figure": 0}
    assert verdict(found, {"sd": 0.004})["passes"] is passes
    assert verdict(None, None)["passes"] is None


def test_calibration_and_expected_loss() -> None:
    labels = np.array([1.0, 0.0, 0.0, 0.0])
    m = metrics.measure(np.zeros(4), labels)
    assert m.calibration == pytest.approx(2.0)
    assert metrics.measure(np.zeros(2), np.zeros(2)).calibration is None
    p = np.array([0.3, 0.3])
    z = np.log(p / (1 - p))
    entropy = -(0.3 * np.log(0.3) + 0.7 * np.log(0.7))
    assert metrics.expected_log_loss(z, p) == pytest.approx(entropy)
