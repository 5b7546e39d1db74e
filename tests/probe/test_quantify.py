"""Error measures against hand values, and what the gate must catch with them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from loka_compile.lowering import gate
from loka_compile.lowering.libraries import kernel_names
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.libraries.torch_scaled_mm import TorchScaledMM
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.probe import measures as ms
from loka_compile.probe import quantify as qt
from loka_compile.probe.statistics import HEAD
from loka_compile.probe.statistics import RING
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.statistics import update

ROWWISE = "torch:rowwise" + EMULATED
TENSORWISE = "torch:tensorwise" + EMULATED
# A reservoir of 256 rows at widths of 64: outputs average over 64 products, as in small layers.
K, N = 64, 48


def observed(*batches: Tensor) -> Statistics:
    state = Statistics.empty(batches[0].shape[1], batches[0].dtype, batches[0].device)
    for batch in batches:
        update(batch, state)
    return state


def site(device="cpu", batches: int = 8, m: int = 32):
    x = [torch.randn(m, K, device=device) for _ in range(batches)]
    g = [torch.randn(m, N, device=device) for _ in range(batches)]
    return torch.randn(N, K, device=device) / K**0.5, observed(*x), observed(*g)


def why(errors, which: str = "robust") -> str | None:
    return gate.why_refused(errors, which, 0.2)


def test_measures_by_hand():
    ref = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    out = torch.tensor([[1.1, -2.0], [3.0, 2.0]])
    m = ms.measure(out, ref)
    # Channel RMS: sqrt(5), sqrt(10); the floors 0.22 and 0.32 lie under every |ref|.
    assert m["mere"] == pytest.approx((0.1 + 0 + 0 + 0.5) / 4, rel=1e-5)
    assert m["mere_clamped"] == pytest.approx(m["mere"], rel=1e-6)
    # Rows: 0.1 / sqrt(5) = 0.045 is fine, 2 / 5 = 0.4 is bad.
    assert m["bad_rows"] == 0.5
    assert m["relative"] == pytest.approx(math.sqrt(0.01 + 4) / math.sqrt(30), rel=1e-5)
    # Channel RMS errors 0.1/sqrt(2) and 2/sqrt(2) over standard deviations 1 and 3.
    assert m["centred"] == pytest.approx((0.1 / 1 + 2 / 3) / 2 / math.sqrt(2), rel=1e-5)
    assert m["non_finite"] == 0


def test_clamped_denominator_has_a_floor():
    ref = torch.tensor([[1e-9], [1.0]])
    m = ms.measure(ref + 0.01, ref)
    floor = 0.1 * math.sqrt(0.5)
    assert m["mere_clamped"] == pytest.approx((0.01 / floor + 0.01) / 2, rel=1e-4)
    assert m["mere"] > 1e6


def test_zero_outputs_give_no_nan():
    zero = torch.zeros(4, 3)
    assert set(ms.measure(zero, zero).values()) == {0.0}
    wrong = ms.measure(zero + 1, zero)
    assert wrong["bad_rows"] == 1 and math.isinf(wrong["mere_clamped"])
    assert math.isinf(wrong["relative"]), "noise without signal is not a perfect ratio"
    assert not any(math.isnan(v) for v in wrong.values())


def test_non_finite_results_are_counted_and_refused():
    ref = torch.ones(4, 3)
    out = ref.clone()
    out[1, 1] = math.nan
    out[2, 0] = math.inf
    m = ms.measure(out, ref)
    assert m["non_finite"] == 2 and m["bad_rows"] == 0.5 and math.isinf(m["mere_clamped"])


@pytest.mark.parametrize("kernel", [ROWWISE, TENSORWISE, "torchao:rowwise" + EMULATED])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_healthy_sites_pass(kernel, direction, device):
    w, x, g = site(device)
    errors = qt.quantify(direction, kernel, w, x, g, torch.float32)
    assert why(errors) is None
    assert errors.samples == qt.SAMPLES
    assert 0.005 < errors.mere_clamped <= errors.mere_clamped_upper < 0.2
    # One e4m3 product: 28 dB; one with e5m2: 24 dB.
    assert 22 < errors.sqnr_db < 32


def test_high_precision_has_no_error(device):
    w, x, g = site(device)
    for direction in DIRECTIONS:
        errors = qt.quantify(direction, HIGH_PRECISION, w, x, g, torch.float32)
        assert errors.mere_clamped < 1e-5 and errors.bad_rows == 0 and errors.sqnr_db > 100


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_planted_scale_bug_is_refused(direction, recipe, monkeypatch):
    """30 % too large everywhere, as a wrong scale format makes it (sglang 39193)."""
    real = TorchScaledMM.emulated_gemm
    monkeypatch.setattr(
        TorchScaledMM, "emulated_gemm", lambda self, *a: real(self, *a) * 1.3, raising=True
    )
    w, x, g = site()
    errors = qt.quantify(direction, f"torch:{recipe}{EMULATED}", w, x, g, torch.float32)
    assert why(errors) is not None
    assert errors.mere_clamped > 0.2


def _heavy_site() -> tuple[Tensor, Statistics, Statistics]:
    """Long batches in which one row of 4096 is a million times larger: the 32 rows kept per batch
    do not hold it, yet the tensor's scale has to cover it."""
    x, g = [], []
    for i in range(8):
        batch = torch.randn(4096, K)
        batch[100 + i] *= 1e6
        x.append(batch)
        g.append(torch.randn(4096, N))
    x, g = observed(*x), observed(*g)
    assert float(x.reservoir().abs().max()) < 100 < 1e5 < float(x.batch_maxima().min())
    return torch.randn(N, K) / K**0.5, x, g


def test_recorded_maxima_expose_a_tensorwise_scale():
    w, x, g = _heavy_site()
    caught = qt.quantify("fwd", TENSORWISE, w, x, g, torch.float32)
    assert caught.bad_rows > 0.9
    assert "rows off" in why(caught) or "MERE" in why(caught)
    # A scale per row is none the worse for it.
    assert why(qt.quantify("fwd", ROWWISE, w, x, g, torch.float32)) is None
    # Without the recorded maxima the failure would not be seen.
    blind = Statistics(x.rows, x.moments, x.scalars.clone())
    blind.scalars[HEAD : HEAD + RING] = 0
    assert why(qt.quantify("fwd", TENSORWISE, w, blind, g, torch.float32)) is None


def test_bad_rows_see_what_the_mean_does_not():
    """5 % of rows flushed to zero: the clamped mean stays under its gate, not the row share."""
    ref = torch.randn(200, N)
    out = ref.clone()
    out[:10] = 0
    m = ms.measure(out, ref)
    assert m["mere_clamped"] < 0.2 and m["bad_rows"] == 0.05
    errors = qt.Errors(m["mere"], m["mere_clamped"], m["mere_clamped"], 0.05, 0.05, 20, 0, 0, 8)
    assert "rows off" in why(errors)


def test_no_finite_row_refuses_and_does_not_raise():
    w, _, g = site()
    x = observed(torch.full((9, K), math.nan))
    errors = qt.quantify("wgrad", ROWWISE, w, x, g, torch.float32)
    assert errors.samples == 0 and "no finite row" in why(errors)


def test_a_few_non_finite_rows_do_not_matter():
    """fp16 with a loss scaler: the first gradients overflow, the later ones count."""
    w, _, _ = site()
    x = [torch.randn(32, K) for _ in range(8)]
    g = [torch.randn(32, N) for _ in range(8)]
    g[0][:] = math.inf
    g[1][5] = math.nan
    for direction in DIRECTIONS:
        errors = qt.quantify(direction, ROWWISE, w, observed(*x), observed(*g), torch.float32)
        assert why(errors) is None, direction


def test_x_and_gradient_are_drawn_together():
    """wgrad errors depend on pairs: row i of x belongs to row i of the gradient."""
    number = torch.arange(1.0, 65.0).unsqueeze(1)
    x, g = observed(number.expand(64, K).clone()), observed(-number.expand(64, N).clone())
    for sample in qt.draw(x, g, torch.float32, samples=3):
        assert sample.x.shape == (qt.ROWS, K)
        torch.testing.assert_close(sample.x[:, 0], -sample.gy[:, 0])
        assert sample.x_amax == 64 and sample.gy_amax == 64


def test_same_seed_same_errors():
    w, x, g = site()
    first = qt.quantify("fwd", ROWWISE, w, x, g, torch.float32)
    assert qt.quantify("fwd", ROWWISE, w, x, g, torch.float32) == first
    assert qt.quantify("fwd", ROWWISE, w, x, g, torch.float32, seed=1) != first


def test_bootstrap_bound():
    assert ms.upper_bound(np.array([0.3] * 8)) == pytest.approx(0.3)
    values = np.random.default_rng(0).normal(1.0, 0.1, 50)
    # Normal theory: mean + 1.96 s / sqrt(n).
    want = values.mean() + 1.96 * values.std() / 50**0.5
    assert ms.upper_bound(values) == pytest.approx(want, abs=0.01)
    assert math.isinf(ms.upper_bound(np.array([0.1, math.inf])))
    assert math.isinf(ms.upper_bound(np.array([0.1, math.nan])))


def test_bf16_sites_are_measured_in_bf16(device):
    w, _, _ = site(device)
    x = observed(*[torch.randn(32, K, device=device).bfloat16() for _ in range(8)])
    errors = qt.quantify("fwd", HIGH_PRECISION, w, x, None, torch.bfloat16)
    assert 1e-4 < errors.mere_clamped < 0.01 and why(errors) is None
    assert why(replace(errors, non_finite=1)) == "1 non-finite results"


@pytest.mark.parametrize("direction", ["fwd", "dgrad"])
@pytest.mark.parametrize("kernel", [k + EMULATED for k in kernel_names()] + ["torch:tensorwise"])
def test_a_weight_that_is_quantised_once_gives_the_same(kernel, direction):
    """At widths that kernels pad, and beyond one block of scales."""
    library, recipe, _ = split_kernel_name(kernel)
    if library.recipes[recipe].gemm(direction) is None:
        pytest.skip("keeps this direction in high precision")
    x, gy = torch.randn(24, 150).bfloat16(), torch.randn(24, 200).bfloat16()
    w = torch.randn(200, 150).bfloat16()
    sample = qt.Sample(x, gy, x.abs().max().float(), gy.abs().max().float())
    once = qt.weight_of(direction, w, kernel)
    assert (once is None) == (library.name == "bf16")
    got, want = (qt.run(direction, sample, w, kernel, ready)[0] for ready in (once, None))
    assert torch.equal(got, want)
