"""Hard Swish and hard sigmoid against PyTorch's, values, derivatives and kinks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from loka_compile.kernels import hard_swish as hs

PAIRS = pytest.mark.parametrize(
    ("ours", "grad", "theirs"),
    [
        (hs.hard_swish, hs.hard_swish_grad, F.hardswish),
        (hs.hard_sigmoid, hs.hard_sigmoid_grad, F.hardsigmoid),
    ],
    ids=["hard_swish", "hard_sigmoid"],
)


def _points(dtype, device):
    three = torch.tensor(3.0, dtype=dtype)
    near = [three.nextafter(torch.tensor(x, dtype=dtype)) for x in (0.0, 9.0)]
    edges = torch.stack([three, *near, *torch.tensor([1.5, 1e30], dtype=dtype)])
    return torch.cat([edges, -edges, torch.linspace(-5, 5, 101, dtype=dtype)]).to(device)


@PAIRS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_value_and_derivative_equal_pytorch(ours, grad, theirs, dtype, device):
    v = _points(dtype, device).requires_grad_()
    want = theirs(v)
    (slope,) = torch.autograd.grad(want.sum(), v)
    # A few roundings of the result's own dtype: an FP32 constant in FP64 arithmetic would show.
    # PyTorch's CUDA kernels have an FP32 sixth also in FP64.
    exact = dtype if torch.device(device).type == "cpu" else torch.float32
    tolerance = 8 * max(torch.finfo(dtype).eps, torch.finfo(exact).eps)
    v = v.detach()
    torch.testing.assert_close(ours(v), want.detach(), rtol=tolerance, atol=tolerance)
    if theirs is F.hardsigmoid:
        # PyTorch's own sixth is an FP32 number, in FP64 too; ours is exact (next test).
        tolerance = 8 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(grad(v), slope, rtol=tolerance, atol=tolerance)
    assert ours(v).dtype == grad(v).dtype == dtype


def test_the_sixth_is_one_of_the_dtype():
    v = torch.tensor([-2.9, 0.0, 2.9], dtype=torch.float64)
    assert hs.hard_sigmoid_grad(v).tolist() == [1 / 6] * 3


def test_kinks_take_the_outer_value():
    v = torch.tensor([-3.0, 3.0], dtype=torch.float64)
    assert hs.hard_swish_grad(v).tolist() == [0.0, 1.0]
    assert hs.hard_sigmoid_grad(v).tolist() == [0.0, 0.0]


def test_least_value():
    v = torch.linspace(-4, 4, 80001, dtype=torch.float64)
    values = hs.hard_swish(v)
    assert values.min().item() == pytest.approx(hs.LEAST, abs=1e-12)
    assert v[values.argmin()].item() == pytest.approx(-1.5, abs=1e-6)


def test_nan_is_kept():
    nan = torch.tensor([float("nan")])
    assert hs.hard_swish(nan).isnan() and hs.hard_sigmoid(nan).isnan()
    assert hs.hard_swish_grad(nan).isnan()
