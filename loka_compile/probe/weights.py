"""What is recorded of weights: the numbers of each, per probed step, in two launches for all.

A weight is there at any time, so no rows are kept of it: its own values are its sample. What its
history adds are maxima and sizes over the steps, plain and exponentially weighted.

On a GPU two Triton kernels do it (`kernels/weight_sizes.py`); `observe_ref` is the definition.

    state  (W, WIDTH) fp64  amax, rms, share of exact zeros, non-finite values, then the same
                            two sizes exponentially weighted, the largest amax, and the probes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.probe.statistics import EW

if TYPE_CHECKING:
    from loka_compile.kernels.weight_sizes import Places

FIELDS = (
    "amax", "rms", "zero_share", "non_finite", "amax_weighted", "rms_weighted", "amax_most",
    "probes",
)  # fmt: skip
WIDTH = len(FIELDS)


class Record:
    """Of some weights (any shapes, one device), which are probed together."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        device = weights[0].device
        self.state = torch.zeros((len(weights), WIDTH), dtype=torch.float64, device=device)
        counts = [float(w.numel()) for w in weights]
        # Made once, since it is made on the host.
        self.sizes = torch.tensor(counts, dtype=torch.float64, device=device)
        self._places: Places | None = None

    def observe(self, weights: Sequence[Tensor]) -> None:
        """Record the weights as they are now. The host does not wait, and copies to the device only
        where a weight has moved."""
        if self.state.device.type != "cuda" or _compat.why_no_triton() is not None:
            observe_ref(weights, self.state, self.sizes)
            return
        from loka_compile.kernels import weight_sizes as kernels

        if self._places is None or self._places.addresses != kernels.addresses_of(weights):
            if kernels.why_not(weights) is not None:
                observe_ref(weights, self.state, self.sizes)
                return
            self._places = kernels.Places.of(weights)
        kernels.record(self._places, self.state, EW)


@torch.no_grad()
def observe_ref(weights: Sequence[Tensor], state: Tensor, counts: Tensor) -> None:
    """Record `weights` into `state` (len(weights), WIDTH); counts: the values of each, fp64.

    A weight with a non-finite value is counted and its sizes keep their last values.
    """
    # Norms narrow nothing by themselves.
    weights = [w.detach().float() if w.dtype == torch.float64 else w.detach() for w in weights]
    amax = torch.stack(torch._foreach_norm(weights, float("inf"), dtype=torch.float32)).double()
    size = torch.stack(torch._foreach_norm(weights, 2.0, dtype=torch.float32)).double()
    rms = size / counts.sqrt()
    live = torch.stack([torch.count_nonzero(w) for w in weights]).double()
    zeros = 1 - live / counts
    # A norm is non-finite exactly where some value is (or its square overflows, as bad).
    good = torch.isfinite(amax) & torch.isfinite(size)
    now = torch.stack([amax, rms, zeros], dim=1)
    state[:, :3] = torch.where(good.unsqueeze(1), now, state[:, :3])
    state[:, 3] += (~good).double()
    weight = torch.where(state[:, 7:8] == 0, 1.0, EW) * good.unsqueeze(1)
    state[:, 4:6] += torch.where(good.unsqueeze(1), now[:, :2] - state[:, 4:6], 0.0) * weight
    state[:, 6] = torch.where(good, torch.maximum(state[:, 6], amax), state[:, 6])
    state[:, 7] += good.double()


def summary(row: Tensor) -> dict[str, float]:
    """One weight's numbers by name."""
    return dict(zip(FIELDS, row.tolist(), strict=True))
