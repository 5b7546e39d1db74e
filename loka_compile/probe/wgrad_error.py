"""Row errors of a weight's gradient, predicted from sketches and recorded coherences.

On a sketch (`sketch.py`) a kernel's arithmetic is run over the whole batch. For row n of the
gradient that gives the noise c_n = |error_n| / s_n, at the row's coherence |gw_n| / s_n
(`coherence.py`); the relative error is the one over the other. Coherences are recorded of many more
batches than there are sketches, and they are what makes one batch's error differ from the next
one's. So each recorded coherence is given the noise of a sketched row whose coherence was near:
c_n grows with it where an error is an offset instead of noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka_compile.lowering import gemm
from loka_compile.probe import sketch as sk
from loka_compile.probe.statistics import Statistics

#: Of the sketched rows, ordered by coherence, one in so many is near on either side.
NEAR = 32


def noise(one: sk.Sketch, kernel: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(coherence, noise), each (GY,) fp64, of the gradient's sketched rows."""
    gy, x = one.gy.to(dtype), one.x.to(dtype)
    out = gemm.wgrad(gy, x, kernel, torch.float32, amax=(one.gy_amax, one.x_amax))
    ref = gy.float().t() @ x.float()
    lengths = (x.double().square() * one.weights).sum(1, keepdim=True)
    spread = (gy.double().square() * lengths).sum(0)
    signal = (ref.double().square() * one.weights).sum(1)
    error = ((out.double() - ref.double()).square() * one.weights).sum(1)
    return (signal / spread).sqrt(), (error / spread).sqrt()


def row_errors(kernel: str, gy: Statistics, dtype: torch.dtype, seed: int = 0) -> Tensor | None:
    """(batches, N) fp64: relative errors of the rows of the weight's gradient in every batch whose
    coherence was recorded; NaN where a row is zero. None where no batch is sketched."""
    recorded = gy.recorded_coherence()
    if gy.sketch is None or gy.marks is None or recorded is None:
        return None
    found = [noise(one, kernel, dtype) for one in sk.sketches(gy.sketch, gy.marks)]
    if not found:
        return None
    at, much = (torch.cat(part) for part in zip(*found, strict=True))
    live = torch.isfinite(at) & (at > 0)
    at, much = at[live], much[live]
    if at.numel() == 0:
        return None
    order = at.argsort()
    at, much = at[order], much[order]
    recorded = recorded.double()
    near = max(1, at.numel() // NEAR)
    generator = torch.Generator().manual_seed(seed)
    jitter = torch.randint(-near, near + 1, recorded.shape, generator=generator).to(at.device)
    pick = torch.searchsorted(at, recorded.contiguous()) + jitter
    error = much[pick.clamp(0, at.numel() - 1)] / recorded
    return torch.where(recorded > 0, error, float("nan"))
