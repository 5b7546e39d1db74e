"""The full covariance, online, against closed forms; merged, saved, sampled, bounded."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import loka_compile
from loka_compile import loka_backend
from loka_compile.ledger import LEDGER
from loka_compile.probe import covariance as cv
from loka_compile.probe import models
from loka_compile.probe import quantify as qt
from loka_compile.probe import store
from loka_compile.probe.merge import merge
from loka_compile.probe.statistics import ROWS_USED
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.statistics import update


def observed(*batches: torch.Tensor, mask: torch.Tensor | None = None) -> Statistics:
    first = batches[0]
    held = Statistics.empty(first.shape[-1], first.dtype, first.device, covariance=True)
    for x in batches:
        update(x, held)
    return held


def closed_form(rows: torch.Tensor) -> torch.Tensor:
    return torch.cov(rows.double().t())


def test_it_equals_the_closed_form_on_awkward_batches(device) -> None:
    batches = [1000 + torch.randn(m, 12, device=device) for m in (7, 64, 1, 33, 200)]
    held = observed(*batches)
    want = closed_form(torch.cat(batches))
    torch.testing.assert_close(held.covariance(), want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(held.covariance().diagonal(), held.variance(), rtol=1e-6, atol=0)


def test_merge_is_exact_in_any_grouping() -> None:
    batches = [1e3 + torch.randn(m, 12) * 2.0**i for i, m in enumerate((7, 64, 1, 33, 200))]
    ranks = [observed(b) for b in batches]
    left = merge(merge(merge(merge(*ranks[:2]), ranks[2]), ranks[3]), ranks[4])
    right = merge(ranks[0], merge(merge(ranks[1], ranks[2]), merge(*ranks[3:])))
    want = closed_form(torch.cat(batches))
    for one in (left, right):
        error = (one.covariance() - want).norm() / want.norm()
        assert error < 1e-6
    # A rank that keeps none leaves nothing to merge with.
    without = Statistics.empty(12, torch.float32, torch.device("cpu"))
    assert merge(ranks[0], without).covariance() is None


def test_non_finite_and_masked_rows_are_left_out() -> None:
    x = torch.randn(40, 6)
    dirty = x.clone()
    dirty[3, 2], dirty[9] = float("nan"), float("inf")
    keep = torch.ones(40, dtype=torch.bool)
    keep[[3, 9, 20]] = False
    mask = torch.arange(40) != 20
    with loka_compile.probe_rows(mask):
        held = observed(dirty)
    torch.testing.assert_close(held.covariance(), closed_form(x[keep]), rtol=1e-9, atol=1e-12)


def test_degenerate_inputs() -> None:
    constant = observed(torch.full((32, 5), 3.0), torch.full((8, 5), 3.0))
    assert constant.covariance().abs().max() == 0
    single = observed(torch.randn(1, 5))
    assert single.covariance().abs().max() == 0
    narrow = observed(torch.randn(64, 1), torch.randn(9, 1))
    assert narrow.covariance().shape == (1, 1)
    nothing = observed(torch.randn(0, 5))
    for held in (constant, single, narrow, nothing):
        for one in qt.draw(held, None, torch.float32, 2, model="gaussian"):
            assert torch.isfinite(one.x).all()
    (one,) = qt.draw(constant, None, torch.float32, 1, model="gaussian")
    torch.testing.assert_close(one.x, torch.full_like(one.x, 3.0))


def test_rows_in_chunks_are_the_same(monkeypatch) -> None:
    x = torch.randn(100, 7)
    whole = observed(x).scatter
    monkeypatch.setattr(cv, "_CHUNK", 7 * 9)
    torch.testing.assert_close(observed(x).scatter, whole, rtol=1e-12, atol=1e-12)


def test_sampling_moments_are_those_of_all_rows_not_of_the_reservoir() -> None:
    """256 of 40,000 rows know a covariance of rank 8 far worse than all of them."""
    mix = torch.randn(8, 64)
    batches = [torch.randn(5000, 8) @ mix + 0.1 * torch.randn(5000, 64) + 5 for _ in range(8)]
    held = observed(*batches)
    want = closed_form(torch.cat(batches)).float()
    x = torch.cat([s.x for s in qt.draw(held, None, torch.float32, 120, model="gaussian")])
    torch.testing.assert_close(x.mean(0), held.mean().float(), rtol=0, atol=0.1)
    own = (torch.cov(x.t()) - want).norm() / want.norm()
    rows = (torch.cov(held.reservoir().t()) - want).norm() / want.norm()
    assert own < 0.03 and own < 0.5 * rows


def test_it_is_saved_and_taken_up_again(tmp_path: Path) -> None:
    held = observed(torch.randn(50, 32))
    path = store.save({("a", "x"): held}, tmp_path / "p.safetensors")
    back = store.load(path)["a", "x"]
    # One triangle is kept: a product by blocks need not be symmetric to the last bit.
    torch.testing.assert_close(back.scatter.tril(), held.scatter.tril(), rtol=0, atol=0)
    torch.testing.assert_close(back.scatter, held.scatter, rtol=1e-12, atol=1e-12)
    found = loka_compile.quantify({"a": torch.randn(16, 32)}, path, kernels=["torch:tensorwise"])
    # No rows in the file: only the reservoir needs some.
    measured = {r["distribution"] for r in found.rows if r["samples"]}
    assert measured == {"gaussian", "diagonal", "standard_normal"}
    # Without a covariance the Gaussian is that of the rows.
    store.save({("a", "x"): replace(held, scatter=None)}, tmp_path / "q.safetensors")
    found = loka_compile.quantify(
        {"a": torch.randn(16, 32)}, tmp_path / "q.safetensors", kernels=["torch:tensorwise"]
    )
    measured = {r["distribution"] for r in found.rows if r["samples"]}
    assert measured == {"diagonal", "standard_normal"}


def test_memory_is_bounded() -> None:
    cpu = torch.device("cpu")
    assert cv.affordable({"wide": 123_200, "narrow": 64}, cpu) == {"narrow"}
    assert cv.affordable({"edge": cv.WIDEST, "over": cv.WIDEST + 1}, cpu) == {"edge"}
    many = cv.affordable({f"s{i}": 2048 for i in range(100)}, cpu)
    assert len(many) * 8 * 2048**2 <= cv.BYTES < (len(many) + 1) * 8 * 2048**2


def test_the_widest_site_of_all_needs_no_k_squared(monkeypatch) -> None:
    """K = 123,200: 61 GB as a matrix. Statistics, merge and every model stay below 2 GiB."""
    monkeypatch.setattr(qt, "ROWS", 32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    k = 123_200
    held = Statistics.empty(k, torch.bfloat16, torch.device("cpu"))
    for _ in range(2):
        update(torch.randn(4, k, dtype=torch.bfloat16), held)
    both = merge(held, held)
    assert both.drawn().shape == (16, k) and float(both.scalars[ROWS_USED]) == 16
    w = torch.randn(16, k, dtype=torch.bfloat16)
    for model in models.MODELS:
        found = qt.quantify("fwd", "torch:rowwise+emulated", w, both, None, w.dtype, 1, model=model)
        assert found.samples == 1 and 0 < found.mere_clamped < 0.2
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2 << 20  # KiB


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_in_training(inner: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    options = {"inner": inner, "emulate": True, "mods": "off", "heads": (), "recipes": "rowwise"}
    run = torch.compile(
        model,
        backend=loka_backend,
        options={**options, "probe_model": "gaussian", "probe_every": 1},
    )
    seen = [torch.randn(24, 32) for _ in range(12)]
    for x in seen:
        run(x).square().sum().backward()
    held = LEDGER.find(model[0].weight).statistics[0, "x"]
    assert held.batches == 12
    torch.testing.assert_close(
        held.covariance(), closed_form(torch.cat(seen)), rtol=1e-6, atol=1e-8
    )
