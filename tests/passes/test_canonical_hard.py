"""Hard sigmoid and hard swish in all spellings."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

SWISHES = {
    "module": nn.Hardswish(),
    "relu6": lambda x: x * F.relu6(x + 3) / 6,
    "relu6-module": lambda x: x * nn.ReLU6()(x + 3.0) * (1 / 6),
    "grouped": lambda x: x * (F.relu6(3 + x) / 6),
    "sixth-first": lambda x: x / 6 * F.relu6(x + 3),
    "clamp": lambda x: x * torch.clamp(x + 3, 0, 6) / 6,
    "clamp-method": lambda x: x.add(3).clamp(min=0, max=6).mul(x).div(6),
    "hardtanh": lambda x: x * F.hardtanh(x + 3, 0.0, 6.0) / 6.0,
    "hardsigmoid": lambda x: F.hardsigmoid(x) * x,
}
SIGMOIDS = {
    "module": nn.Hardsigmoid(),
    "relu6": lambda x: F.relu6(x + 3) / 6,
    "clamp": lambda x: (x + 3).clamp(0, 6) * (1 / 6),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SWISHES)
def test_hardswish(name, dtype, capture, close):
    fn = SWISHES[name]
    captured = capture(fn)
    x = 4 * torch.randn(4, 50, dtype=dtype)
    # At a kink clamp, relu6 and hardswish choose different subgradients.
    x = torch.where((x.abs() - 3).abs() < 0.05, 1.0, x).to(dtype).requires_grad_()
    results = []
    for run in (captured, fn):
        y = run(x)
        results.append((y, torch.autograd.grad(y.sum(), x)[0]))
    for got, want in zip(*results, strict=True):
        close(got, want, dtype)
    (node,) = captured.nodes(F.hardswish)
    assert len(node.args) == 1
    assert len(captured.after[0].graph.nodes) <= 4


@pytest.mark.parametrize("name", SIGMOIDS)
def test_hardsigmoid(name, capture, close):
    fn = SIGMOIDS[name]
    captured = capture(fn)
    x = 4 * torch.randn(4, 50)
    close(captured(x), fn(x))
    assert captured.count(F.hardsigmoid) == 1
    assert captured.count(F.hardswish) == 0


LEFT = {
    "other-width": (lambda x, y: x * F.relu6(x + 3) / 5, None),
    "other-range": (lambda x, y: x * torch.clamp(x + 3, 0, 5) / 6, None),
    "other-shift": (lambda x, y: x * F.relu6(x + 2) / 6, None),
    "other-value": (lambda x, y: y * F.relu6(x + 3), None),
    "in-place": (lambda x, y: F.relu6(x + 3, True) / 6, None),
    "reader": (lambda x, y: (h := F.relu6(x + 3)) / 6 + h, "other readers"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name, capture, close):
    fn, why = LEFT[name]
    captured = capture(fn)
    x, y = torch.randn(4), torch.randn(4)
    close(captured(x, y), fn(x, y))
    assert captured.count(F.hardswish, F.hardsigmoid) == 0
    assert why is None or why in captured.refusals()


def test_fp64_is_left(capture):
    captured = capture(lambda x: x * F.relu6(x + 3) / 6)
    x = torch.randn(4, dtype=torch.float64)
    assert torch.equal(captured(x), x * F.relu6(x + 3) / 6)
    assert "1/6 rounded" in captured.refusals()


def test_a_product_that_overflows_in_half_is_left(capture):
    captured = capture(lambda x: x * F.relu6(x + 3) / 6)
    assert captured(torch.full((2,), 2e4, dtype=torch.float16)).isinf().all()
    assert "overflows in float16" in captured.refusals()


def test_inplace_by_position_is_a_write(capture):
    """nn.Hardswish(inplace=True) gives `inplace` by position."""
    act, linear = nn.Hardswish(inplace=True), nn.Linear(4, 4, bias=False)
    norm = nn.RMSNorm(4)

    def forward(x):
        h = linear(x)
        act(x)
        return norm(h) + x

    captured = capture(forward, "exact")
    mine = torch.randn(3, 4)
    theirs = mine.clone()
    assert torch.allclose(captured(mine), forward(theirs), atol=1e-6)
    assert torch.equal(mine, theirs)
    assert "written to in place" in captured.refusals("fuse")
