"""Log loss, normalised entropy, AUC and relative log loss, over all rows and over windows."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.metrics import log_loss as _log_loss
from sklearn.metrics import roc_auc_score


@dataclass(frozen=True)
class Metrics:
    """Of one arm on some rows. None where undefined: no rows, one class only, logits not finite."""

    log_loss: float | None
    ne: float | None
    auc: float | None
    rows: int
    non_finite: int
    #: Mean prediction over mean label.
    calibration: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(logits: np.ndarray, labels: np.ndarray) -> Metrics:
    """``logits`` float ``[n]``, ``labels`` float ``[n]`` of 0 and 1; computed in float64.

    One logit that is not finite makes every figure None: a mean over the rest would hide it.
    """
    bad = int((~np.isfinite(logits)).sum())
    if bad or len(labels) == 0:
        return Metrics(None, None, None, len(labels), bad)
    loss = mean_log_loss(logits, labels)
    entropy = base_entropy(labels)
    if entropy == 0.0:
        return Metrics(loss, None, None, len(labels), 0, _calibration(logits, labels))
    auc = float(roc_auc_score(labels, logits))
    return Metrics(loss, loss / entropy, auc, len(labels), 0, _calibration(logits, labels))


def _calibration(logits: np.ndarray, labels: np.ndarray) -> float | None:
    rate = float(np.mean(labels, dtype=np.float64))
    return float(_sigmoid(logits).mean() / rate) if rate else None


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    # Beyond +-30 the sigmoid rounds towards 0 or 1; scikit-learn clips there by dtype.
    return 1.0 / (1.0 + np.exp(-np.clip(logits.astype(np.float64), -30.0, 30.0)))


def expected_log_loss(logits: np.ndarray, truth: np.ndarray) -> float:
    """Mean over rows of the loss expected under ``truth``, the probability of label 1.

    No label's chance is in it, so two models are told apart on far fewer rows.
    """
    z = np.clip(logits.astype(np.float64), -30.0, 30.0)
    p = truth.astype(np.float64)
    return float(np.mean(np.logaddexp(0.0, z) - p * z))


def mean_log_loss(logits: np.ndarray, labels: np.ndarray) -> float:
    """Mean log loss in nats."""
    return float(_log_loss(labels, _sigmoid(logits), labels=[0.0, 1.0]))


def base_entropy(labels: np.ndarray) -> float:
    """Entropy in nats of always predicting the mean of these ``labels``; 0 for one class."""
    p = float(np.mean(labels, dtype=np.float64))
    if p in (0.0, 1.0):
        return 0.0
    return -(p * math.log(p) + (1.0 - p) * math.log1p(-p))


def relative_percent(variant: Metrics, base: Metrics) -> float | None:
    """RLL: 100 * (loss of variant - loss of base) / loss of base. Positive means worse."""
    if variant.log_loss is None or not base.log_loss:
        return None
    return 100.0 * (variant.log_loss - base.log_loss) / base.log_loss


def windows(rows: int, count: int) -> list[tuple[int, int]]:
    """``count`` half-open ranges that cover ``rows`` and differ by at most one row in size."""
    count = max(1, min(count, rows))
    edges = [rows * i // count for i in range(count + 1)]
    return list(itertools.pairwise(edges))
