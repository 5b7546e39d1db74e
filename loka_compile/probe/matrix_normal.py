"""The paper's distribution of a weight: matrix-normal, by an exponentially averaged flip-flop.

    W ~ MN(M, U, V)      vec(W - M) ~ N(0, V (x) U),  U (M, M) of the rows, V (N, N) of the columns
    U' = A A^T / N,  A = Wc L_V^-T          V' = B^T B / M,  B = L_U^-1 Wc
    U <- m U + (1 - m) U', V alike; made symmetric, jittered, and U scaled to trace M

In FP64, where Cholesky holds (in FP32 the paper's jitter fails); jitter grows tenfold on failure,
then eigenvalues are clamped. U = I and V = var(W) I to begin with, and momentum
min(m, 1 - 1/(t + 9)), so that the first updates count but no single one is believed. One slowly
moving weight does not identify U and V: as a sample the weight itself is better, and the default.
Source: LoKA (arXiv 2605.10886), III.A.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

JITTER = 1e-6
TRIES = 8


def factor(covariance: Tensor) -> Tensor:
    """L with L L^T = covariance + jitter (n, n) fp64; lower triangular unless Cholesky fails."""
    n = covariance.shape[0]
    covariance = (covariance + covariance.t()).double() / 2
    eye = torch.eye(n, dtype=torch.float64, device=covariance.device)
    jitter = JITTER * float(covariance.diagonal().sum().clamp(min=0)) / n
    for _ in range(TRIES):
        lower, info = torch.linalg.cholesky_ex(covariance + jitter * eye)
        if int(info) == 0 and bool(torch.isfinite(lower).all()):
            return lower
        jitter = 10 * jitter if jitter > 0 else torch.finfo(torch.float64).tiny
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp(min=0).sqrt()


@dataclass
class MatrixNormal:
    """`update` with the weight, off the hot path; `sample` draws weights of its shape."""

    mean: Tensor
    u: Tensor
    v: Tensor
    momentum: float = 0.9
    updates: int = 0
    #: Weights that the mean is an average of; 0: it is what it was given as.
    followed: int = 0

    @classmethod
    def of(cls, mean: Tensor, variance: float, momentum: float = 0.9) -> MatrixNormal:
        """variance: of the elements about `mean` (M, N). Raises ValueError for a bad momentum."""
        if not 0 <= momentum < 1:
            raise ValueError(
                f"momentum {momentum}: want 0 <= momentum < 1 (the paper: 0.9 to 0.99)"
            )
        m, n = mean.shape
        rows = torch.eye(m, dtype=torch.float64, device=mean.device)
        columns = torch.eye(n, dtype=torch.float64, device=mean.device)
        return cls(mean.double(), rows, variance * columns, momentum)

    def update(self, w: Tensor) -> None:
        """One flip-flop with w (M, N); nothing where it is the mean or not finite, or where the
        covariances have become too small to divide by."""
        centred = w.double() - self.mean
        if not bool(torch.isfinite(centred).all()) or not bool(centred.any()):
            return
        m, n = centred.shape
        keep = min(self.momentum, 1 - 1 / (self.updates + 10))
        left = _solve(self.v, centred.t()).t()
        u = keep * self.u + (1 - keep) * (left @ left.t() / n)
        right = _solve(self.u, centred)
        v = keep * self.v + (1 - keep) * (right.t() @ right / m)
        if not bool(torch.isfinite(u).all()) or not bool(torch.isfinite(v).all()):
            return
        self.updates += 1
        u, v = _settled(u), _settled(v)
        scale = u.diagonal().sum() / m
        self.u, self.v = u / scale, v * scale

    def follow(self, w: Tensor) -> None:
        """Move the mean towards w (M, N): an average with `momentum`, without a start's bias."""
        self.followed += 1
        rate = (1 - self.momentum) / (1 - self.momentum**self.followed)
        self.mean = self.mean + rate * (w.double() - self.mean)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """M + L_U Z L_V^T, fp64 (M, N)."""
        z = torch.randn(self.mean.shape, dtype=torch.float64, generator=generator)
        return self.mean + factor(self.u) @ z.to(self.mean.device) @ factor(self.v).t()


def _solve(covariance: Tensor, right: Tensor) -> Tensor:
    """L^-1 right; through the pseudo-inverse where L is no triangle."""
    lower = factor(covariance)
    if bool((lower.triu(1) == 0).all()):
        return torch.linalg.solve_triangular(lower, right, upper=False)
    return torch.linalg.pinv(lower) @ right


def _settled(covariance: Tensor) -> Tensor:
    n = covariance.shape[0]
    covariance = (covariance + covariance.t()) / 2
    jitter = JITTER * covariance.diagonal().sum() / n
    return covariance + jitter * torch.eye(n, dtype=torch.float64, device=covariance.device)
