"""Distribution models: what rows a site is believed to see, drawn from its statistics.

    reservoir        real rows with replacement, and recorded batch maxima for tensorwise scales
                     (the default: no model of single rows knows a batch's maximum)
    gaussian         N(mean, covariance): the full covariance where it is kept (`covariance.py`),
                     else that of the reservoir's rows, in factor form: mean + G A,
                     A = (rows - mean) / sqrt(R - 1); no Cholesky, no K^2
    diagonal         N(mean, diag(variance)) of the Welford state
    standard_normal  N(0, 1), what kernel benchmarks use
Source: LoKA (arXiv 2605.10886), III.A for the Gaussians; the first is ours.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from loka_compile.probe.matrix_normal import factor
from loka_compile.probe.statistics import ROWS_USED
from loka_compile.probe.statistics import Statistics

MODELS = ("reservoir", "gaussian", "diagonal", "standard_normal")


def uses_recorded_maxima(model: str) -> bool:
    return model == "reservoir"


def needs_rows(model: str, statistics: Statistics) -> bool:
    """Can this model draw only where real rows are held."""
    return model == "reservoir" or (model == "gaussian" and statistics.scatter is None)


def rows(model: str, held: Tensor, statistics: Statistics, pick: Tensor, seed: int) -> Tensor:
    """Rows (count, C) in held's dtype. held: the finite reservoir rows; pick: row draw shared by a
    site's input and gradient (int64 (count,)), for models that pair them."""
    count = pick.shape[0]
    if model == "reservoir":
        return held[pick]
    # On the CPU, so that every device draws the same numbers.
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(held.device)

    features = held.shape[1]
    if model == "standard_normal":
        return normal(count, features).to(held.dtype)
    if model == "diagonal":
        mean, std = statistics.mean().float(), statistics.variance().sqrt().float()
        return (mean + normal(count, features) * std).to(held.dtype)
    if model == "gaussian" and statistics.scatter is not None:
        lower = _factor(statistics.scatter, int(statistics.scalars[ROWS_USED].item()))
        mean = statistics.mean().float()
        return (mean + normal(count, features) @ lower.t()).to(held.dtype)
    if model == "gaussian":
        wide = held.float()
        mean = wide.mean(0)
        factor = (wide - mean) / max(wide.shape[0] - 1, 1) ** 0.5
        return (mean + normal(count, wide.shape[0]) @ factor).to(held.dtype)
    raise ValueError(f"unknown distribution model {model!r}; one of {', '.join(MODELS)}")


#: The last factor made: a site's samples come one after another, and one is memory enough.
_LAST: list[tuple[weakref.ref[Tensor], int, Tensor]] = []


def _factor(scatter: Tensor, rows: int) -> Tensor:
    """fp32 L with L L^T = scatter / (rows - 1), factored in FP64."""
    if not _LAST or _LAST[0][0]() is not scatter or _LAST[0][1] != rows:
        lower = factor(scatter / max(rows - 1, 1)).float()
        _LAST[:] = [(weakref.ref(scatter), rows, lower)]
    return _LAST[0][2]
