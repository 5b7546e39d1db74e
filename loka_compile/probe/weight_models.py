"""probe_weight_model="matrix_normal": the paper's distribution of every weight of a run.

Updated when the state is saved (every 10,000 steps and at exit), on the host and in the saver's
thread: a flip-flop factors two matrices of a weight's own size, which has no place in a step. The
mean is an average of the weights seen, momentum 0.9, without the bias of its start.

Weights with a side over 2,048 and what would pass the memory bound get none; the report of
`quantify` then has no row for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field

import torch
from torch import Tensor

from loka_compile.probe.matrix_normal import MatrixNormal

WIDEST = 2048
BYTES = 512 << 20


@dataclass(eq=False)
class WeightModels:
    """layer -> its matrix-normal, in the shape of the parameter, on the host in FP64."""

    held: dict[str, MatrixNormal] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for one in self.held.values() for t in (one.mean, one.u, one.v))

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """One flip-flop of each of `weights` (2-D, any device); of new ones, where there is room.

        Weights with a non-finite value are passed over.
        """
        for name, weight in weights.items():
            w = weight.detach().to("cpu", torch.float64)
            if w.dim() != 2 or not bool(torch.isfinite(w).all()):
                continue
            if name not in self.held:
                m, n = w.shape
                size = 8 * (m * n + m * m + n * n)
                if max(m, n) > WIDEST or self.nbytes + size > BYTES:
                    continue
                # About the first mean, which is zero: a constant weight has no other variance.
                self.held[name] = MatrixNormal.of(torch.zeros_like(w), float((w * w).mean()))
            self.held[name].update(w)
            self.held[name].follow(w)
