"""Every product with a parameter becomes F.linear, unless shapes or dtypes forbid it."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

LINEAR = torch._C._nn.linear
K, N = 6, 10


def parameters():
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(N, K)), nn.Parameter(torch.randn(K, N))


SPELLINGS = {
    "at": lambda x, nk, kn: x @ kn,
    "at-t": lambda x, nk, kn: x @ nk.t(),
    "at-T": lambda x, nk, kn: x @ nk.T,
    "at-mT": lambda x, nk, kn: x @ nk.mT,
    "at-transpose": lambda x, nk, kn: x @ nk.transpose(0, 1),
    "at-transpose-negative": lambda x, nk, kn: x @ torch.transpose(nk, -2, -1),
    "at-permute": lambda x, nk, kn: x @ nk.permute(1, 0),
    "at-tt": lambda x, nk, kn: x @ kn.t().t(),
    "at-ttt": lambda x, nk, kn: x @ nk.t().t().T,
    "matmul": lambda x, nk, kn: torch.matmul(x, other=kn),
    "matmul-method": lambda x, nk, kn: x.matmul(nk.t()),
    "mm": lambda x, nk, kn: torch.mm(x, kn),
    "mm-method": lambda x, nk, kn: x.mm(mat2=kn),
    "linear-keywords": lambda x, nk, kn: F.linear(input=x, weight=nk),
    "linear-tt": lambda x, nk, kn: F.linear(x, nk.t().t()),
    "linear-t": lambda x, nk, kn: F.linear(x, kn.t()),
}


@pytest.mark.parametrize("shape", [(K,), (4, K), (2, 3, K), (1, 2, 3, K)])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name, shape, capture, close):
    if name.startswith("mm") and len(shape) != 2:
        pytest.skip("mm takes matrices only")
    nk, kn = parameters()
    x = torch.randn(shape)

    def forward(x):
        return SPELLINGS[name](x, nk, kn)

    captured = capture(forward)
    close(captured(x), forward(x))
    (node,) = captured.nodes(LINEAR)
    assert len(node.args) == 3
    assert not node.kwargs
    assert captured.count(operator.matmul, torch.matmul, torch.mm, "matmul", "mm") == 0
    # Stored (N, K): the parameter itself, no transpose left.
    if "nk" in SPELLINGS[name].__code__.co_varnames and name not in ("linear-t",):
        stored_kn = name in ("at", "at-tt", "matmul", "mm", "mm-method")
        assert (node.args[1].op == "placeholder") is not stored_kn


def test_gradients_reach_a_weight_stored_as_kn(capture, close):
    _, kn = parameters()
    x = torch.randn(4, K)
    capture(lambda x: x @ kn)(x).square().sum().backward()
    got, kn.grad = kn.grad, None
    (x @ kn).square().sum().backward()
    close(got, kn.grad)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x, y: x @ y,
        lambda x, y: torch.einsum("mk,kn->mn", x, y),
        lambda x, y: torch.matmul(y, x.new_ones(4, 3)),
    ],
)
def test_products_of_activations_stay(forward, capture, close):
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    captured = capture(forward)
    close(captured(x, y), forward(x, y))
    assert captured.count(LINEAR) == 0


@pytest.mark.parametrize(
    "add",
    [
        lambda y, b: y + b,
        lambda y, b: b + y,
        lambda y, b: torch.add(y, b),
        lambda y, b: y.add(b),
        lambda y, b: torch.add(b, other=y, alpha=1),
    ],
)
def test_bias_added_by_hand(add, capture, close):
    nk, _ = parameters()
    b = nn.Parameter(torch.randn(N))

    def forward(x):
        return add(F.linear(x, nk), b)

    captured = capture(forward)
    x = torch.randn(2, 3, K)
    close(captured(x), forward(x))
    (node,) = captured.nodes(LINEAR)
    assert node.args[2] is not None
    assert captured.count(operator.add, torch.add, "add") == 0


def test_addmm(capture, close):
    _, kn = parameters()
    b = nn.Parameter(torch.randn(N))
    captured = capture(lambda x: torch.addmm(b, x, kn))
    x = torch.randn(4, K)
    close(captured(x), torch.addmm(b, x, kn))
    assert captured.nodes(LINEAR)[0].args[2] is not None


REFUSED = {
    "broadcast": (lambda x, nk, b: F.linear(x, nk) + b[None], (N,), None),
    "row": (lambda x, nk, b: F.linear(x, nk) + b, (1, N), "its shape (1, 10)"),
    "one": (lambda x, nk, b: F.linear(x, nk) + b, (1,), "its shape (1,)"),
    "alpha": (lambda x, nk, b: torch.add(F.linear(x, nk), b, alpha=2), (N,), None),
    "twice": (lambda x, nk, b: F.linear(x, nk, b) + b, (N,), "has a bias already"),
    "reader": (lambda x, nk, b: (y := F.linear(x, nk)) + b + y, (N,), "other readers"),
    "in-place": (lambda x, nk, b: F.linear(x, nk).add_(b), (N,), "in place"),
    "addmm": (lambda x, nk, b: torch.addmm(b, x, nk.t()), (4, 1), "addmm of shape"),
    "addmm-beta": (lambda x, nk, b: torch.addmm(b, x, nk.t(), beta=2), (N,), "alpha or beta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bias_refused(name, capture, close):
    forward, shape, why = REFUSED[name]
    nk, _ = parameters()
    b = nn.Parameter(torch.randn(shape))
    captured = capture(lambda x: forward(x, nk, b))
    x = torch.randn(4, K)
    close(captured(x), forward(x, nk, b))
    assert captured.count(operator.add, torch.add, "add_", torch.addmm) >= 1
    assert why is None or why in captured.refusals()


def test_a_wider_bias_keeps_the_result_wide(capture, close):
    """bf16 linear + fp32 bias is an fp32 sum; one op would crash or round the bias."""
    nk = nn.Parameter(torch.randn(N, K, dtype=torch.bfloat16))
    b = nn.Parameter(torch.randn(N))
    captured = capture(lambda x: F.linear(x, nk) + b)
    x = torch.randn(4, K, dtype=torch.bfloat16)
    close(captured(x), F.linear(x, nk) + b)
    assert "dtypes differ" in captured.refusals()


def test_a_cast_before_the_bias_is_kept(capture, close):
    nk, _ = parameters()
    b = nn.Parameter(torch.randn(N))
    captured = capture(lambda x: F.linear(x, nk).to(torch.bfloat16) + b)
    x = torch.randn(4, K)
    got = captured(x)
    assert torch.equal(got, F.linear(x, nk).to(torch.bfloat16) + b)
    assert captured.count("to") == 1


def test_no_join_across_a_write(capture, close):
    nk, _ = parameters()
    b = nn.Parameter(torch.randn(N))

    def forward(x):
        y = x @ nk.t()
        x.mul_(3)
        return y + b + x.sum()

    captured = capture(forward)
    mine = torch.randn(4, K)
    theirs = mine.clone()
    close(captured(mine), forward(theirs))
    close(mine, theirs)
    assert "written to in place" in captured.refusals()


def test_autocast_dtype_is_kept(capture, close):
    _, kn = parameters()
    captured = capture(lambda x: x @ kn)
    x = torch.randn(4, K)
    with torch.autocast("cpu", torch.bfloat16):
        close(captured(x), x @ kn, torch.bfloat16)


@pytest.mark.parametrize("spelling", [torch.matmul, operator.matmul, lambda w, x: w.matmul(x)])
@pytest.mark.parametrize("shape", [(K, 1), (4, K, 1), (2, 3, K, 1)])
@pytest.mark.parametrize("precision", ["fp32", "autocast"])
def test_a_parameter_times_columns(spelling, shape, precision, capture, close):
    """TorchRec's full-rank CrossNet: matmul(kernel, x) with x (B, K, 1)."""
    nk, kn = parameters()
    x, on = torch.randn(shape), precision == "autocast"
    for forward in (lambda x: spelling(nk, x) + 1, lambda x: spelling(kn.t(), x) + 1):
        captured = capture(forward)
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            close(captured(x), forward(x), torch.bfloat16 if on else torch.float32)
        assert captured.count(LINEAR) == 1


def test_columns_of_another_width_or_without_a_parameter_stay(capture):
    nk, _ = parameters()
    for forward in (lambda x: nk @ x, lambda x: x.mT @ x[..., :1]):
        captured = capture(forward)
        captured(torch.randn(4, K, 2))
        assert captured.count(LINEAR) == 0
