"""Matrix-normal: convergence on repeated draws, sampling moments, degenerate covariances."""

from __future__ import annotations

import pytest
import torch

from loka_compile.probe.matrix_normal import MatrixNormal
from loka_compile.probe.matrix_normal import factor


def ar(n: int, rho: float) -> torch.Tensor:
    at = torch.arange(n, dtype=torch.float64)
    return rho ** (at.unsqueeze(1) - at.unsqueeze(0)).abs()


def test_flip_flop_converges_on_repeated_draws() -> None:
    u, v = ar(24, 0.9), 4e-3 * ar(16, 0.7)
    lu, lv = torch.linalg.cholesky(u), torch.linalg.cholesky(v)
    held = MatrixNormal.of(torch.zeros(24, 16), 4e-3, momentum=0.99)
    for _ in range(400):
        held.update(lu @ torch.randn(24, 16, dtype=torch.float64) @ lv.t())
    got, want = torch.kron(held.v, held.u), torch.kron(v, u)
    assert (got - want).norm() / want.norm() < 0.15
    assert float(held.u.diagonal().sum()) == pytest.approx(24, rel=1e-9)
    assert float(held.v.diagonal().mean()) == pytest.approx(4e-3, rel=0.1)


def test_sampling_moments() -> None:
    held = MatrixNormal(torch.full((6, 4), 2.0).double(), ar(6, 0.8), 0.5 * ar(4, 0.5))
    draws = torch.stack([held.sample() for _ in range(4000)])
    torch.testing.assert_close(draws.mean(0), held.mean, rtol=0, atol=0.06)
    # vec() stacks columns: V (x) U.
    flat = draws.transpose(1, 2).reshape(4000, -1)
    torch.testing.assert_close(torch.cov(flat.t()), torch.kron(held.v, held.u), rtol=0, atol=0.06)


def test_factor_of_covariances_that_defeat_cholesky() -> None:
    a = torch.randn(64, 8, dtype=torch.float64)
    deficient = a @ a.t()
    indefinite = deficient - 1e-2 * torch.eye(64)
    dominated = torch.eye(64, dtype=torch.float64)
    dominated[0, 0] = 1e12
    for one in (deficient, indefinite, dominated, torch.zeros(5, 5).double()):
        lower = factor(one)
        assert torch.isfinite(lower).all()
        assert (lower @ lower.t() - one).norm() <= 0.05 * one.norm() + 1e-6


def test_constant_non_finite_and_single_element_weights() -> None:
    held = MatrixNormal.of(torch.zeros(3, 2), 1.0)
    held.update(torch.zeros(3, 2))
    held.update(torch.full((3, 2), float("nan")))
    assert held.updates == 0
    one = MatrixNormal.of(torch.zeros(1, 1), 1.0)
    for _ in range(50):
        one.update(torch.tensor([[2.0]]))
    assert float(one.u) == pytest.approx(1) and float(one.v) == pytest.approx(4, rel=1e-3)
    with pytest.raises(ValueError, match="momentum"):
        MatrixNormal.of(torch.zeros(1, 1), 1.0, momentum=1.0)
