"""Ways to predict the row errors of a weight's gradient, for `bench_probe_prediction.py`.

    rows                rows of many batches; each sample takes the coherence of one batch
    rows_all_batches    the same rows, the coherences of all recorded batches
    sketches            whole batches of some columns, those that are held, as they are
    sketches_coherence  their noise, matched to the coherences of all recorded batches

Each gives relative errors (batches, N), NaN for rows that are zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from loka_compile.lowering import gemm
from loka_compile.probe import quantify as qt
from loka_compile.probe import sketch as sk
from loka_compile.probe import wgrad_error
from loka_compile.probe.statistics import Statistics

Try = Callable[[str, Statistics, Statistics, torch.dtype], Tensor]


def _row_noise(kernel: str, x: Statistics, gy: Statistics, dtype: torch.dtype) -> Tensor:
    """(samples, N): |error_n| / s_n on half of the rows held."""
    found = []
    for one in qt.draw(x, gy, dtype, distinct=True):
        out = gemm.wgrad(one.gy, one.x, kernel, torch.float32, amax=(one.gy_amax, one.x_amax))
        error = (out - one.gy.float().t() @ one.x.float()).double().norm(dim=1)
        lengths = one.x.double().norm(dim=1, keepdim=True)
        noise = error / (one.gy.double() * lengths).norm(dim=0)
        found.append(torch.where(torch.isfinite(noise), noise, 0.0))
    return torch.stack(found)


def _over(noise: Tensor, coherence: Tensor) -> Tensor:
    return torch.where(coherence > 0, noise / coherence, float("nan"))


def rows(kernel: str, x: Statistics, gy: Statistics, dtype: torch.dtype) -> Tensor:
    noise, recorded = _row_noise(kernel, x, gy, dtype), gy.recorded_coherence()
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(recorded.shape[0], (noise.shape[0],), generator=generator)
    return _over(noise, recorded.double()[picks])


def rows_all_batches(kernel: str, x: Statistics, gy: Statistics, dtype: torch.dtype) -> Tensor:
    noise, recorded = _row_noise(kernel, x, gy, dtype), gy.recorded_coherence().double()
    return _over(noise.unsqueeze(0), recorded.unsqueeze(1)).flatten(0, 1)


def sketches(kernel: str, x: Statistics, gy: Statistics, dtype: torch.dtype) -> Tensor:
    found = [wgrad_error.noise(s, kernel, dtype) for s in sk.sketches(gy.sketch, gy.marks)]
    return torch.stack([_over(noise, coherence) for coherence, noise in found])


def sketches_coherence(kernel: str, x: Statistics, gy: Statistics, dtype: torch.dtype) -> Tensor:
    return wgrad_error.row_errors(kernel, gy, dtype)


TRIES: dict[str, Try] = {
    one.__name__: one for one in (rows, rows_all_batches, sketches, sketches_coherence)
}
