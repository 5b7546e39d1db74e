"""What one extra backward of a probed step shows: each site's input beside the logits' gradient.

It starts from seeds v at the logits (`probe/likelihood.py`), so what reaches a site is J^T v, which
the Gauss-Newton score needs. While it runs the observers record nothing: instead the op that sees a
site's gradient together with its input hands both to the collector. All rows of a few samples are
kept: errors of one sample's rows share the weight's error, so they are not independent.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field

import torch
from torch import Tensor

from loka_compile.probe.statistics import Statistics

#: Samples of one probe, and numbers kept of one site in it: wide sites keep fewer samples.
SAMPLES = 256
LEAST_SAMPLES = 16
ELEMENTS = 1 << 20
#: Probes whose rows are kept.
KEPT = 4


@dataclass(frozen=True)
class Taken:
    """x (S * t, K), j (S * t, N): all rows of S samples; amax: of the whole batch's x."""

    x: Tensor
    j: Tensor
    amax: Tensor
    samples: int


@dataclass(eq=False)
class Collector:
    """Takes rows while an extra backward runs.

    sites: site -> statistics of its gradient. batch: samples in it; picks: int64 (S,), the samples
    to keep. taken and refused: what came of it, by site.
    """

    sites: Mapping[str, Statistics]
    batch: int
    picks: Tensor
    taken: dict[str, Taken] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def take(self, held: Statistics, gy: Tensor, x: Tensor) -> None:
        """gy (..., N), x (..., K) of the site whose gradient's statistics are `held`."""
        site = next((name for name, one in self.sites.items() if one is held), None)
        if site is None:
            return
        gy = gy.detach().reshape(-1, gy.shape[-1])
        x = x.detach().reshape(-1, x.shape[-1])
        m = x.shape[0]
        if m == 0 or m % self.batch:
            self.refused[site] = (
                f"its {m} rows are no multiple of the {self.batch} samples that leave the graph"
            )
            return
        each = m // self.batch
        width = each * (x.shape[1] + gy.shape[1])
        picks = self.picks[: max(LEAST_SAMPLES, ELEMENTS // width)]
        rows = picks.unsqueeze(1) * each + torch.arange(each, device=picks.device)
        rows = rows.flatten()
        self.taken[site] = Taken(x[rows], gy[rows], x.abs().amax(), picks.shape[0])


# Not thread-local: autograd runs the backward of CUDA tensors in a thread of its own.
_active: list[Collector] = []


@contextmanager
def collecting(collector: Collector) -> Iterator[None]:
    """The backward inside is an extra one: observers leave their state alone."""
    _active.append(collector)
    try:
        yield
    finally:
        _active.pop()


def collector() -> Collector | None:
    return _active[-1] if _active else None
