"""The estimator on measured H200 times (microseconds), and on made-up kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loka_compile.lowering import estimator
from loka_compile.lowering.cost_store import CostTable
from loka_compile.lowering.cost_table import CostKey
from loka_compile.lowering.cost_table import CostRow
from loka_compile.lowering.measure import estimated

#: M, K, N: bf16, FP8 tensorwise, FP8 rowwise (torch), FP8 rowwise (FBGEMM), the GEMM alone.
MEASURED = {
    (1024, 256, 256): (2.9, 3.0, 4.1, 3.2),
    (1024, 7680, 256): (11.6, 9.0, 20.7, 11.9),
    (1024, 512, 512): (3.5, 3.4, 4.8, 3.6),
    (1024, 7680, 512): (15.8, 9.5, 21.0, 12.1),
    (1024, 4096, 2048): (24.9, 13.9, 14.0, 13.7),
    (1024, 4096, 2560): (32.3, 18.0, 22.8, 23.4),
    (1024, 2048, 4096): (25.4, 14.6, 14.1, 15.4),
    (1024, 2560, 4096): (32.6, 17.7, 17.7, 18.5),
    (1024, 7680, 7680): (181, 96.6, 99.5, 108.5),
    (2048, 256, 768): (4.0, 3.8, 4.3, 4.5),
    (2048, 123200, 1024): (750, 400, 404, 449),
    (6144, 2048, 2048): (78.8, 44.1, 43.0, 48.4),
    (8192, 4096, 4096): (407, 218, 213, 225),
}
PRODUCTS = [(m, n, k) for m, k, n in MEASURED]
TIMES = np.array(list(MEASURED.values()), float)
SMS = 132


def _left_out_predictions() -> np.ndarray:
    """Each shape by fits that never saw it, form selection included."""
    found = np.zeros_like(TIMES)
    for i in range(len(PRODUCTS)):
        rest = [j for j in range(len(PRODUCTS)) if j != i]
        for column in range(TIMES.shape[1]):
            fitted = estimator.fit([PRODUCTS[j] for j in rest], TIMES[rest, column], SMS)
            assert fitted is not None
            found[i, column] = fitted.predict(*PRODUCTS[i])
    return found


def test_left_out_shapes_are_predicted_and_chosen_well():
    predicted = _left_out_predictions()
    errors = np.abs(predicted / TIMES - 1)
    assert np.median(errors) < 0.15
    assert (np.median(errors, axis=0) < 0.15).all()
    chosen = TIMES[np.arange(len(TIMES)), predicted.argmin(1)]
    assert (chosen / TIMES.min(1) - 1).mean() < 0.03


def test_waves_are_quantised():
    products = np.array([[128 * 132, 128, 64], [128 * 132 + 1, 128, 64]], float)
    one, two = estimator.waves(products, (128, 128), SMS, split=False)
    assert two == 2 * one
    smooth = estimator.waves(products, None, SMS, split=False)
    assert smooth[1] / smooth[0] == pytest.approx(1, rel=1e-4)
    # 16 tiles leave most of the device idle; splitting the contraction fills it.
    few = np.array([[1024, 256, 7680]], float)
    whole = estimator.waves(few, (128, 128), SMS, split=False)[0]
    assert estimator.waves(few, (128, 128), SMS, split=True)[0] == whole / 8


def test_a_kernel_of_the_form_is_found_again():
    random = np.random.default_rng(0)
    products = np.array(random.integers(64, 8192, (30, 3)), float)
    us = 3 + 0.2 * estimator.waves(products, (128, 128), SMS, False) * 1e-6
    fitted = estimator.fit([tuple(map(int, p)) for p in products], us.tolist(), SMS)
    assert fitted is not None
    new = np.array([[4096, 2048, 512], [1000, 3000, 5000]], float)
    want = 3 + 0.2 * estimator.waves(new, (128, 128), SMS, False) * 1e-6
    got = [fitted.predict(*map(int, p)) for p in new]
    np.testing.assert_allclose(got, want, rtol=0.03)


def test_directions_are_other_products():
    assert estimator.product_of("fwd", 1, 2, 3) == (1, 3, 2)
    assert estimator.product_of("dgrad", 1, 2, 3) == (1, 2, 3)
    assert estimator.product_of("wgrad", 1, 2, 3) == (3, 2, 1)


def _row(m: int, k: int, n: int, us: float, epilogue: str = "") -> CostRow:
    key = CostKey.of(
        "torch:rowwise", "fwd", m, k, n, torch.bfloat16, torch.device("cpu"), epilogue=epilogue
    )
    return CostRow(key, us, "2026-01-01")


def test_prices_of_shapes_without_rows():
    rows = [_row(m, k, n, t[2]) for (m, k, n), t in MEASURED.items()]
    table = CostTable(None, rows)
    bare = estimated(_row(4096, 2048, 2048, 1).key, table)
    assert bare is not None and bare.us is not None and bare.source == "estimated"
    # Between the measured 1024 x 4096 x 2048 and 6144 x 2048 x 2048.
    assert 14.0 < bare.us < 43.0
    fused = estimated(_row(4096, 2048, 2048, 1, "block_norm:256:hard_swish").key, table)
    assert fused is not None and fused.us is not None and fused.us > bare.us
    assert estimated(_row(4096, 2048, 2048, 1).key, CostTable(None, rows[:5])) is None


def test_rows_that_hold_come_before_stale_ones():
    from dataclasses import replace

    rows = [_row(m, k, n, t[2]) for (m, k, n), t in MEASURED.items()]
    stale = [replace(r, us=100 * r.us, key=replace(r.key, torch="2.0")) for r in rows]
    key = _row(4096, 2048, 2048, 1).key
    mixed, alone = (
        estimated(key, CostTable(None, rows + stale)),
        estimated(key, CostTable(None, rows)),
    )
    assert mixed == alone
    assert estimated(key, CostTable(None, stale)) is not None
