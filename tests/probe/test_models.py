"""Distribution models: moments of what is drawn, and what each is blind to."""

from __future__ import annotations

import pytest
import torch

from loka_compile.probe import models
from loka_compile.probe.quantify import draw
from loka_compile.probe.quantify import quantify
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.statistics import update

CPU = torch.device("cpu")


def observed(make, features: int, batches: int = 8) -> Statistics:
    held = Statistics.empty(features, torch.float32, CPU)
    for _ in range(batches):
        update(make(), held)
    return held


def drawn(model: str, held: Statistics, samples: int = 40) -> torch.Tensor:
    return torch.cat([s.x for s in draw(held, None, torch.float32, samples, model=model)])


def test_moments_of_each_model() -> None:
    mix = torch.randn(6, 6)
    held = observed(lambda: torch.randn(256, 6) @ mix + 3, 6)
    rows = held.reservoir()
    for model in models.MODELS:
        x = drawn(model, held)
        mean, covariance = x.mean(0), torch.cov(x.t())
        if model == "standard_normal":
            want_mean, want = torch.zeros(6), torch.eye(6)
        elif model == "diagonal":
            want_mean, want = held.mean().float(), torch.diag(held.variance().float())
        else:
            want_mean, want = rows.mean(0), torch.cov(rows.t())
        scale = want.diagonal().max()
        torch.testing.assert_close(mean, want_mean, rtol=0, atol=float(0.1 * scale.sqrt()))
        torch.testing.assert_close(covariance, want, rtol=0, atol=float(0.1 * scale))


def test_reservoir_rows_are_real_rows() -> None:
    held = observed(lambda: torch.randn(64, 5), 5)
    known = {tuple(r.tolist()) for r in held.reservoir()}
    assert {tuple(r.tolist()) for r in drawn("reservoir", held, 2)} <= known


def test_only_the_reservoir_sees_a_rare_batch_maximum() -> None:
    """One row in a batch of 512 is 20,000 times the others: tensorwise flushes the rest."""

    def batch() -> torch.Tensor:
        x = torch.randn(512, 64)
        x[7] *= 2e4
        return x

    held = observed(batch, 64)
    w = torch.randn(32, 64)
    bad = {
        model: quantify(
            "fwd", "torch:tensorwise+emulated", w, held, None, torch.float32, model=model
        ).bad_rows
        for model in models.MODELS
    }
    assert bad["reservoir"] > 0.5
    assert bad["standard_normal"] == 0 and bad["diagonal"] < 0.05


def test_unknown_model_is_named() -> None:
    held = observed(lambda: torch.randn(64, 5), 5)
    with pytest.raises(ValueError, match="unknown distribution model 'normal'"):
        drawn("normal", held)
