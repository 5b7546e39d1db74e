"""How much a kernel's error at one site harms the model: predicted KL, in nats per sample.

    e     output of the kernel minus that of high precision, at one site
    J     gradient of the sample's logit with respect to that output
    dz_i  sum over the sample's entries of J * e            (signed: what cancels counts as nothing)
    KL    mean_i 0.5 p_i (1 - p_i) dz_i^2

Local error measures tell a broken kernel from a sound one; they do not rank sites by harm, since
harm spans decades where local errors hardly differ. For a calibrated model KL is the expected rise
of the log loss. Scores add up over sites in FP8 (factor 0.9 to 1.4 of the whole), so a loss budget
is a knapsack.

`logit_score` needs one extra backward, of the sum of the logits, for all sites and kernels;
`taken_score` is the same on rows that the runtime took, with sqrt(p (1 - p)) in the seed.
`state_score` needs none: the gradient of a mean-reduced loss is J (p - y) / B in expectation of the
square (the empirical Fisher), and the Probe's paired rows have it. It is noisier, and takes a
sample's rows (tokens) to be independent.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loka_compile.probe import quantify as qt
from loka_compile.probe.extra_backward import Taken
from loka_compile.probe.statistics import Statistics


@dataclass(frozen=True)
class Score:
    """Predicted KL of switching one site's forward to `kernel` alone, nats per sample."""

    site: str
    kernel: str
    nats: float


def sample_shift(error: Tensor, jacobian: Tensor, samples: int) -> Tensor:
    """dz (samples,) fp64. error, jacobian (M, N), rows of one sample next to each other."""
    if samples <= 0 or error.shape[0] % samples:
        raise ValueError(
            f"sample_shift: {error.shape[0]} rows are not a multiple of {samples} samples"
        )
    return (error.double() * jacobian.double()).reshape(samples, -1).sum(1)


def divergence(shift: Tensor, probability: Tensor) -> float:
    """mean 0.5 p (1 - p) dz^2 of a Bernoulli likelihood; both (samples,)."""
    p = probability.double()
    return float((0.5 * p * (1 - p) * shift**2).mean())


@torch.no_grad()
def logit_score(kernel: str, w: Tensor, x: Tensor, jacobian: Tensor, probability: Tensor) -> float:
    """KL of `kernel` at a site on one batch: w (N, K), x (M, K), jacobian (M, N) of the sum of the
    logits, probability (samples,)."""
    zero = torch.zeros((), dtype=torch.float32, device=x.device)
    out, _ = qt.run("fwd", qt.Sample(x, None, zero, None), w.to(x.dtype), kernel)
    high, _ = qt.run("fwd", qt.Sample(x, None, zero, None), w.to(x.dtype), qt.HIGH_PRECISION)
    shift = sample_shift(out.double() - high.double(), jacobian, probability.shape[0])
    return divergence(shift, probability)


@torch.no_grad()
def taken_score(kernel: str, w: Tensor, held: Iterable[Taken]) -> float:
    """KL of `kernel` at a site on what extra backwards took: mean of 0.5 (sum of J^T v * e)^2.

    w (N, K). NaN where nothing is held.
    """
    total = torch.zeros((), dtype=torch.float64, device=w.device)
    samples = 0
    # A plan is made inside the user's step, whose autocast is not meant for this.
    with torch.amp.autocast(w.device.type, enabled=False):
        for one in held:
            sample, own = qt.Sample(one.x, None, one.amax, None), w.detach().to(one.x.dtype)
            out, _ = qt.run("fwd", sample, own, kernel)
            high, _ = qt.run("fwd", sample, own, qt.HIGH_PRECISION)
            error = out.double() - high.double()
            total += 0.5 * (sample_shift(error, one.j, one.samples) ** 2).sum()
            samples += one.samples
    return float(total) / samples if samples else float("nan")


@torch.no_grad()
def state_score(
    kernel: str,
    w: Tensor,
    x: Statistics,
    gy: Statistics,
    dtype: torch.dtype,
    *,
    samples: int,
    rows: int,
    draws: int = qt.SAMPLES,
    seed: int = 0,
) -> float:
    """KL of `kernel` at a site from the Probe's state alone, nats per sample.

    samples: B, the samples that the loss is a mean over; rows: M of the site, a multiple of B for
    sites with several rows per sample. NaN where no finite row was seen, or rows are no pairs.
    """
    w = w.detach().to(dtype)
    found = []
    if qt.why_unpaired(gy) is not None:
        return float("nan")
    for sample in qt.draw(x, gy, dtype, draws, seed):
        if sample.gy is None:
            break
        out, _ = qt.run("fwd", sample, w, kernel)
        high, _ = qt.run("fwd", sample, w, qt.HIGH_PRECISION)
        each = ((out.double() - high.double()) * sample.gy.double()).sum(1) * samples
        found.append(0.5 * float((each**2).mean()) * rows / samples)
    return sum(found) / len(found) if found else float("nan")


def within_budget(
    scores: Mapping[str, Mapping[str, float]],
    gain: Mapping[str, Mapping[str, float]],
    budget: float,
) -> dict[str, str]:
    """site -> kernel with the largest total gain whose predicted KL sums to at most `budget`.

    scores[site][kernel]: nats; gain[site][kernel]: what is saved over high precision (a time, or a
    share of the FLOPs); sites left out stay in high precision. Non-finite scores are not taken. An
    exact integer programme (scipy's HiGHS).
    """
    import numpy as np
    from scipy.optimize import Bounds
    from scipy.optimize import LinearConstraint
    from scipy.optimize import milp

    cells = [
        (site, kernel)
        for site, kernels in scores.items()
        for kernel, nats in kernels.items()
        if nats == nats and nats <= budget and gain[site][kernel] > 0
    ]
    if not cells:
        return {}
    # In units of the budget: nats of 1e-8 would drown in the solver's tolerance.
    cost = np.array([[max(scores[s][k], 0.0) / budget for s, k in cells]])
    sites = list(dict.fromkeys(s for s, _ in cells))
    one_each = np.array([[float(s == site) for s, _ in cells] for site in sites])
    gains = np.array([gain[s][k] for s, k in cells])
    solved = milp(
        -gains / gains.max(),
        integrality=np.ones(len(cells)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(cost, ub=1.0), LinearConstraint(one_each, ub=1.0)],
    )
    if solved.x is None:
        return {}
    return {s: k for (s, k), taken in zip(cells, solved.x, strict=True) if taken > 0.5}
