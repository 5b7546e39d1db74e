"""State of a site that begins here, or goes on with what an earlier run or a calibration saved."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loka_compile.names import Site
from loka_compile.passes.observe import StateKey
from loka_compile.probe.statistics import BATCHES
from loka_compile.probe.statistics import CANDIDATES
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.statistics import slots


def empty_state(key: StateKey, site: Site, weight: Tensor) -> Statistics:
    gradient = key.role == "g"
    return Statistics.empty(
        site.n if gradient else site.k,
        site.dtype,
        weight.device,
        gradient=gradient,
        covariance=key.covariance,
    )


def forget_unpaired(x: Statistics, gradient: Statistics) -> None:
    """What a calibration recorded of an input has no gradient to its rows: wgrad needs pairs."""
    covered = int(gradient.scalars[CANDIDATES])
    behind = int(x.scalars[CANDIDATES]) - covered
    if behind and (not covered or behind < 0):
        for tensor in (*x.tensors, *(gradient.tensors if covered else ())):
            tensor.zero_()
        return
    if behind:
        # Saved behind a forward: the gradients of its rows never came, and what lies in their
        # places belongs to rows that are gone.
        first = torch.tensor(covered, device=gradient.rows.device)
        gradient.rows.index_fill_(0, slots(first, behind), math.nan)
        gradient.scalars[CANDIDATES] = covered + behind
    if gradient.pairing is not None:
        gradient.pairing.resumes(
            int(x.scalars[BATCHES] - gradient.scalars[BATCHES]),
            filled=bool(gradient.scalars[CANDIDATES]),
        )
