"""Log loss, normalised entropy, AUC and relative log loss, over all rows and over windows."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

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
        return Metrics(loss, None, None, len(labels), 0)
    auc = float(roc_auc_score(labels, logits))
    return Metrics(loss, loss / entropy, auc, len(labels), 0)


def mean_log_loss(logits: np.ndarray, labels: np.ndarray) -> float:
    """Mean log loss in nats."""
    z = logits.astype(np.float64)
    # Beyond +-30 the sigmoid rounds towards 0 or 1; scikit-learn clips there by dtype.
    p = 1.0 / (1.0 + np.exp(-np.clip(z, -30.0, 30.0)))
    return float(_log_loss(labels, p, labels=[0.0, 1.0]))


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
