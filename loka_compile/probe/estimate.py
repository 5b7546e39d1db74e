"""An estimate of a planned kernel's error between probes, cheap enough to watch and without a sync.

The rows held are quantised with the maximum of the newest batch, the weight is what it is now. So
the estimate moves when a batch's maximum leaves the rows behind or the weight's does, which is what
breaks a tensorwise scale; moments would not tell, since a lone maximum is in them too.

It is the clamped MERE with a floor of 0.1 x (size of the row) x (size of the channel): rows of an
earlier, smaller or larger, time of the run count like the others. Over some of the channels only,
always the same: the whole product in FP32 would be most of a probed step.
"""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.kernels.orientations import Scale
from loka_compile.lowering import gemm
from loka_compile.lowering import weights
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.recipes import EMULATED
from loka_compile.plan import SitePlan
from loka_compile.probe.statistics import BATCHES
from loka_compile.probe.statistics import CANDIDATES
from loka_compile.probe.statistics import HEAD
from loka_compile.probe.statistics import RESERVOIR
from loka_compile.probe.statistics import RING
from loka_compile.probe.statistics import Statistics

log = logging.getLogger("loka_compile")

#: Of a clamped error's denominator, in channel RMS. Here: starts do not load `quantify`.
FLOOR = 0.1
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


#: Kernel -> why an estimate of it in few launches has failed.
_FAILED: dict[str, str] = {}


@torch.no_grad()
def clamped_error(kernel: str, w: Tensor, x: Statistics) -> Tensor:
    """() fp32 on the device: the clamped MERE of `kernel`, w (N, K) or (K, N). 0 without rows."""
    if w.shape[1] != x.features:
        w = w.t()
    w = w.detach()
    scales = scales_of(kernel)
    runs = w.device.type == "cuda" and _compat.why_no_triton() is None
    if scales is not None and runs and kernel not in _FAILED:
        try:
            return by_kernels(kernel, w, x, *scales)
        except Exception as error:
            # Plain torch does it too, in many more launches; where it cannot either, it says so.
            why = f"{type(error).__name__}: {error}"
            if not isinstance(error, torch.OutOfMemoryError):
                _FAILED[kernel] = why
            log.debug("errors of %s are estimated by plain torch: %s", kernel, why)
    return _in_plain_torch(kernel, w, x)


def scales_of(kernel: str) -> tuple[Scale, Scale] | None:
    """How the kernel reads its operands, where our quantiser can give both; else None."""
    of_w = weights.scale_of(kernel, "fwd")
    if of_w is None or of_w.kind not in ("tensor", "row"):
        return None
    library, recipe, _ = split_kernel_name(kernel)
    rule = library.recipes[recipe].gemm("fwd")
    if rule is None or rule.a.granularity.value not in ("tensor", "row"):
        return None
    return Scale(rule.a.granularity.value, rule.a.dtype), of_w


def by_kernels(kernel: str, w: Tensor, x: Statistics, of_x: Scale, of_w: Scale) -> Tensor:
    """As `clamped_error`, w (N, K), in a dozen launches."""
    from loka_compile.kernels import estimate as kernels

    rows, good = kernels.clean(x.rows, x.scalars)
    step = max(w.shape[0] // CHANNELS, 1)
    some = w[::step][:CHANNELS]
    # One scale for the weight is taken from all of it.
    whole = of_w.kind == "tensor"
    w8, scale = _quantised(w if whole else some, of_w, rows.dtype)
    ready = (_quantised(rows, of_x), (w8[::step][:CHANNELS] if whole else w8, scale))
    out = gemm.forward(rows, some, kernel, ready=ready)
    return kernels.error(out, rows.float() @ some.to(rows.dtype).float().t(), good, FLOOR)


def _quantised(t: Tensor, scale: Scale, dtype: torch.dtype | None = None) -> gemm.Quantized:
    """t (R, C), rounded to `dtype` first."""
    if dtype == torch.float32:
        t, dtype = t.to(dtype), None
    found = weights.both(t.device)(t, scale, None, columns_up=True, dtype=dtype)
    assert found.q is not None and found.scale is not None
    return found.q, found.scale


def _in_plain_torch(kernel: str, w: Tensor, x: Statistics) -> Tensor:
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
    largest = torch.linalg.vector_norm(w, math.inf).float()
    some = w[:: max(w.shape[0] // CHANNELS, 1)][:CHANNELS]
    rows, w = rows.to(x.rows.dtype), some.to(x.rows.dtype).contiguous()
    # A maximum given stands for one scale; other scales are the rows' own.
    out = gemm.forward(rows, w, kernel, amax=(amax, largest)).float()
    ref = rows.float() @ w.float().t()
    row, channel = ref.norm(dim=1, keepdim=True), ref.norm(dim=0, keepdim=True)
    scale = ref.abs().maximum(FLOOR * row * (channel / ref.norm()))
    error = torch.where(scale > 0, (out - ref).abs() / scale, 0.0)
    return error.sum() / (count * error.shape[1])
