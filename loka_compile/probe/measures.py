"""What is measured of a product against its FP32 reference, and bounds of its mean over samples.

    mere          mean |out - ref| / |ref|, as the paper defines it. It has no finite mean for
                  outputs centred on zero: reported, not gated on by default.
    mere_clamped  the same with the denominator floored at 0.1 x RMS of the output channel
    median_row    median of ||out - ref|| / ||ref|| over the rows whose reference is not zero
    bad_rows      share of rows with ||out - ref|| > 0.1 ||ref||: the only one that sees a range
                  failure of a tensorwise scale
    sqnr_db       -20 log10(||out - ref|| / ||ref||)
    centred       per-channel RMS error over the channel's standard deviation, mean over channels
Source: LoKA (arXiv 2605.10886), section III.A; the clamped form and the row share are ours.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from loka_compile.probe.estimate import FLOOR

BAD_ROW = 0.1
MEASURES = (
    "mere", "mere_clamped", "bad_rows", "median_row", "relative", "centred", "non_finite",
)  # fmt: skip
_BOOTSTRAP = 1000


def measure(out: Tensor, ref: Tensor) -> dict[str, float]:
    """The measures of one sample; out, ref (R, C)."""
    return dict(zip(MEASURES, measures(out, ref).tolist(), strict=True))


def measures(out: Tensor, ref: Tensor) -> Tensor:
    """fp64 (MEASURES,) on the device of `out`: nothing here waits for it."""
    out, ref = out.double(), ref.double()
    difference = (out - ref).abs()
    magnitude = ref.abs()
    floor = FLOOR * ref.pow(2).mean(0, keepdim=True).sqrt()
    finite = torch.isfinite(difference)
    difference = torch.where(finite, difference, float("inf"))
    row_error = difference.norm(dim=1)
    row_size = magnitude.norm(dim=1)
    spread = ref.std(0, unbiased=False)
    channel_error = difference.pow(2).mean(0).sqrt()
    live = spread > 0
    centred = torch.where(live, channel_error / torch.where(live, spread, 1.0), 0.0)
    found = {
        "mere": ratio(difference, magnitude).mean(),
        "mere_clamped": ratio(difference, magnitude.maximum(floor)).mean(),
        "bad_rows": (row_error > BAD_ROW * row_size).double().mean(),
        "median_row": _median(ratio(row_error, row_size), row_size > 0),
        "relative": ratio(difference.norm(), magnitude.norm()),
        "centred": centred.sum() / live.sum().clamp(min=1),
        "non_finite": (~finite).sum().double(),
    }
    return torch.stack([found[name] for name in MEASURES])


def _median(values: Tensor, live: Tensor) -> Tensor:
    """Of the live ones; of all where none is (then a row without signal may still carry noise)."""
    counted = live | ~live.any()
    middle = torch.where(counted, values, float("nan")).nanmedian()
    return torch.where((values.isnan() & counted).any(), float("nan"), middle)


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b with 0 / 0 = 0."""
    return torch.where(a == 0, 0.0, a / b)


def upper_bound(values: np.ndarray, seed: int = 0) -> float:
    """97.5 % bootstrap bound of the mean of `values` (one per sample)."""
    return interval(values, seed)[1]


def interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the mean of `values` (one per sample)."""
    if not np.isfinite(values).all():
        return float("inf"), float("inf")
    draws = np.random.default_rng(seed).integers(len(values), size=(_BOOTSTRAP, len(values)))
    low, high = np.quantile(values[draws].mean(1), (0.025, 0.975))
    return float(low), float(high)
