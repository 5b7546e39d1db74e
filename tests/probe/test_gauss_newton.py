"""Scores against closed forms: a one-layer model, ranks, and the budget's integer programme."""

from __future__ import annotations

import pytest
import torch

from loka_compile.probe import gauss_newton as gn
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.statistics import update

ROWWISE = "torch:rowwise+emulated"


def test_score_of_a_last_layer_is_its_kl() -> None:
    """logit = x @ w: J is 1, dz the error itself, and KL is 0.5 p (1 - p) dz^2 to first order."""
    x, w = torch.randn(4000, 64), torch.randn(1, 64) / 8
    logit = x @ w.t()
    p = logit.sigmoid().squeeze(1)
    got = gn.logit_score(ROWWISE, w, x, torch.ones_like(logit), p)
    from loka_compile.lowering import gemm

    low = gemm.forward(x, w, ROWWISE).double().squeeze(1)
    q, p = low.sigmoid(), logit.double().sigmoid().squeeze(1)
    kl = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
    assert got == pytest.approx(float(kl), rel=0.05)


def test_errors_that_cancel_within_a_sample_count_as_nothing() -> None:
    error = torch.tensor([[1.0], [-1.0], [2.0], [1.0]])
    shift = gn.sample_shift(error, torch.ones(4, 1), 2)
    assert shift.tolist() == [0.0, 3.0]
    assert gn.divergence(shift, torch.tensor([0.5, 0.5])) == pytest.approx(0.5 * 0.25 * 9 / 2)
    with pytest.raises(ValueError, match="multiple"):
        gn.sample_shift(error, torch.ones(4, 1), 3)


def test_state_score_agrees_with_the_logit_score() -> None:
    """Of a mean-reduced loss: E (p - y)^2 = p (1 - p)."""
    torch.manual_seed(1)
    w = torch.randn(1, 64) / 8
    x_held = Statistics.empty(64, torch.float32, torch.device("cpu"))
    g_held = Statistics.empty(1, torch.float32, torch.device("cpu"), gradient=True)
    exact = []
    for _ in range(8):
        x = torch.randn(1000, 64)
        p = (x @ w.t()).sigmoid()
        y = torch.bernoulli(p)
        update(x, x_held)
        update((p - y) / 1000, g_held)
        exact.append(gn.logit_score(ROWWISE, w, x, torch.ones(1000, 1), p.squeeze(1)))
    got = gn.state_score(ROWWISE, w, x_held, g_held, torch.float32, samples=1000, rows=1000)
    assert got == pytest.approx(sum(exact) / 8, rel=0.35)


def test_budget_takes_the_best_set_not_the_greedy_one() -> None:
    """The best single ratio (a) leaves no room; b and c together gain more."""
    scores = {
        "a": {"f": 6e-7, "n": 1e-3},
        "b": {"f": 5e-7},
        "c": {"f": 5e-7},
        "d": {"f": float("nan")},
    }
    gain = {"a": {"f": 9.0, "n": 99.0}, "b": {"f": 7.0}, "c": {"f": 7.0}, "d": {"f": 50.0}}
    assert gn.within_budget(scores, gain, 1e-6) == {"b": "f", "c": "f"}
    assert gn.within_budget(scores, gain, 1e-9) == {}
