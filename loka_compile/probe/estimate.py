"""An estimate of a planned kernel's error between probes, cheap enough to watch and without a sync.

The rows held are quantised with the maximum of the newest batch, the weight is what it is now. So
the estimate moves when a batch's maximum leaves the rows behind or the weight's does, which is what
breaks a tensorwise scale; moments would not tell, since a lone maximum is in them too.

It is the clamped MERE with a floor of 0.1 x (size of the row) x (size of the channel): rows of an
earlier, smaller or larger, time of the run count like the others. Over some of the channels only,
always the same: the whole product in FP32 would be most of a probed step.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

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

log = logging.getLogger("loka_compile")

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


class Replayed:
    """`clamped_error` of one site, again and again: on a GPU one CUDA graph, since its hundred
    small kernels would take the host a millisecond."""

    def __init__(self, kernel: str, w: Tensor, x: Statistics) -> None:
        self.kernel = kernel
        self._of = self._signature(w, x)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._out: Tensor | None = None
        self._refused = False

    @staticmethod
    def _signature(w: Tensor, x: Statistics) -> tuple[object, ...]:
        return (w.data_ptr(), w.shape, w.stride(), w.dtype, x.rows.data_ptr(), x.scalars.data_ptr())

    def holds(self, kernel: str, w: Tensor, x: Statistics) -> bool:
        """Was it made of these, as they lie."""
        return self.kernel == kernel and self._of == self._signature(w, x)

    def __call__(self, w: Tensor, x: Statistics) -> Tensor:
        """() fp32 on the device, a tensor of its own."""
        if w.device.type != "cuda":
            return clamped_error(self.kernel, w, x)
        if self._graph is None:
            return self._record(w, x)
        self._graph.replay()
        assert self._out is not None
        return self._out.clone()

    def _record(self, w: Tensor, x: Statistics) -> Tensor:
        """The error, and a graph of it for later."""
        with torch.cuda.device(w.device):
            stream, pool = _side_stream(w.device.index)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # What a kernel does at its first call only is no part of the graph.
                found = clamped_error(self.kernel, w, x)
                if not self._refused:
                    self._graph = self._recorded(w, x, pool)
            torch.cuda.current_stream().wait_stream(stream)
            found.record_stream(torch.cuda.current_stream())
        return found

    def _recorded(self, w: Tensor, x: Statistics, pool: Any) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads of the user's program may go on meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._out = clamped_error(self.kernel, w, x)
            finally:
                graph.capture_end()
        except Exception as error:
            self._refused = True
            log.debug("the error estimate of %s is not recorded: %s", self.kernel, error)
            return None
        return graph


@functools.cache
def _side_stream(device: int) -> tuple[torch.cuda.Stream, Any]:
    """A stream for all estimates, and the memory that their graphs share: one at a time replays,
    and its result is copied before the next."""
    return torch.cuda.Stream(device), torch.cuda.graph_pool_handle()


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
