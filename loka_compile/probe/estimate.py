"""An estimate of a planned kernel's error between probes, cheap enough to watch and without a sync.

The rows held are quantised with the maximum of the newest batch, the weight is what it is now. So
the estimate moves when a batch's maximum leaves the rows behind or the weight's does, which is what
breaks a tensorwise scale; moments would not tell, since a lone maximum is in them too.

It is the clamped MERE with a floor of 0.1 x (size of the row) x (size of the channel): rows of an
earlier, smaller or larger, time of the run count like the others. Over some of the channels only,
always the same: the whole product in FP32 would be most of a probed step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loka_compile.lowering import gemm
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.recipes import EMULATED
from loka_compile.plan import SitePlan
from loka_compile.probe.quantify import FLOOR
from loka_compile.probe.statistics import BATCHES
from loka_compile.probe.statistics import CANDIDATES
from loka_compile.probe.statistics import HEAD
from loka_compile.probe.statistics import RESERVOIR
from loka_compile.probe.statistics import RING
from loka_compile.probe.statistics import Statistics

#: Channels over which the error is taken.
CHANNELS = 256


def kernel_of(plan: SitePlan | None, device: torch.device, *, emulated: bool) -> str | None:
    """The FP8 kernel that runs this site's forward on `device`; None where none does."""
    choice = plan.choice("fwd") if plan is not None else None
    if choice is None or not choice.is_fp8:
        return None
    if emulated:
        return choice.kernel.removesuffix(EMULATED) + EMULATED
    library, _, forced = split_kernel_name(choice.kernel)
    return choice.kernel if forced or library.why_unavailable(device) is None else None


@torch.no_grad()
def clamped_error(kernel: str, w: Tensor, x: Statistics) -> Tensor:
    """() fp32 on the device: the clamped MERE of `kernel`, w (N, K) or (K, N). 0 without rows."""
    if w.shape[1] != x.features:
        w = w.t()
    rows = x.rows[:RESERVOIR].float()
    slot = torch.arange(rows.shape[0], device=rows.device)
    good = (slot < x.scalars[CANDIDATES]) & torch.isfinite(rows).all(dim=1)
    rows = torch.where(good.unsqueeze(1), rows, 0.0)
    count = good.sum().clamp(min=1)
    newest = HEAD + (x.scalars[BATCHES].long() - 1).clamp(min=0) % RING
    # Rows of larger batches may still be held: none may lie beyond its own scale.
    # Not `scalars[newest]`: an index of no dimension is read as a number, for which the host waits.
    amax = x.scalars.gather(0, newest.reshape(1)).squeeze(0).float().maximum(rows.abs().max())
    # Of all channels: a kernel with one scale for the weight takes it from all of it.
    largest = torch.linalg.vector_norm(w.detach(), math.inf).float()
    some = w.detach()[:: max(w.shape[0] // CHANNELS, 1)][:CHANNELS]
    rows, w = rows.to(x.rows.dtype), some.to(x.rows.dtype).contiguous()
    # A maximum given stands for one scale; other scales are the rows' own.
    out = gemm.forward(rows, w, kernel, amax=(amax, largest)).float()
    ref = rows.float() @ w.float().t()
    row, channel = ref.norm(dim=1, keepdim=True), ref.norm(dim=0, keepdim=True)
    scale = ref.abs().maximum(FLOOR * row * (channel / ref.norm()))
    error = torch.where(scale > 0, (out - ref).abs() / scale, 0.0)
    return error.sum() / (count * error.shape[1])
