"""One user pattern as a pass: what matches, what is refused and why, what comes in its place."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import loka_compile
from loka_compile.passes import graph as g

LINEAR = torch._C._nn.linear


@loka_compile.pattern(example=lambda: (torch.randn(4, 8),), preserves=True)
def swish(x):
    return F.silu(x)


@swish.replace
def _(x):
    return F.hardswish(x)


@loka_compile.pattern(example=lambda: (torch.randn(4, 8), torch.randn(8, 8), torch.randn(4, 8)))
def residual(x, w, r):
    return r + torch.tanh(x @ w) * r


@residual.replace
def _(x, w, r):
    return torch.addcmul(r, (x @ w).tanh(), r)


def residual_of(x, w):
    return x + torch.tanh(x @ w) * x


@pytest.mark.parametrize(
    "write",
    [F.silu, lambda x: x * torch.sigmoid(x), lambda x: x.sigmoid() * x, nn.SiLU()],
)
def test_silu_in_every_spelling(write, capture, close):
    captured = capture(lambda x: write(x + 1), [swish.as_pass()])
    x = torch.randn(5, 3, 8)
    close(captured(x), F.hardswish(x + 1))
    assert captured.notes("rewrites", "swish") == ["swish: 1 nodes replaced"]


@pytest.mark.parametrize(
    "write",
    [
        residual_of,
        lambda x, w: torch.tanh(x @ w) * x + x,
        lambda x, w: torch.add(x, other=torch.mul(x, torch.matmul(x, w).tanh())),
        lambda x, w: x.add(torch.matmul(other=w, input=x).tanh().mul(x)),
    ],
)
@pytest.mark.parametrize("parameter", [False, True])
def test_spellings_and_orders(write, parameter, capture, close):
    w = torch.randn(8, 8)
    w = nn.Parameter(w) if parameter else w
    captured = capture(write, [residual.as_pass()])
    x = torch.randn(4, 8)
    close(captured(x, w), residual_of(x, w))
    assert captured.count(torch.addcmul) == 1 and captured.notes("changes", "residual")


def test_one_input_name_binds_one_node(capture):
    captured = capture(lambda x, w, r: x + torch.tanh(x @ w) * r, [residual.as_pass()])
    captured(torch.randn(4, 8), torch.randn(8, 8), torch.randn(4, 8))
    assert captured.count(torch.addcmul) == 0


def test_shared_intermediate_is_a_near_miss(capture):
    def forward(x, w):
        h = torch.tanh(x @ w)
        return x + h * x, h.sum()

    captured = capture(forward, [residual.as_pass()])
    captured(torch.randn(4, 8), torch.randn(8, 8))
    assert captured.count(torch.addcmul) == 0
    why = captured.refusals("residual")
    assert "is also read by" in why and "test_user_pattern.py:" in why


def test_no_match_across_mutation(capture, close):
    def forward(x, w):
        h = torch.tanh(x @ w)
        x.add_(1)
        return x + h * x

    captured = capture(forward, [residual.as_pass()])
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    want = forward(x.clone(), w)
    close(captured(x, w), want)
    assert "written to in place" in captured.refusals("residual")


def test_symbolic_batch(capture, close):
    @loka_compile.pattern(example=lambda: (torch.randn(4, 8), torch.randn(4, 8)))
    def both(a, b):
        return a * torch.sin(b)

    @both.replace
    def _(a, b):
        return (a.reshape(a.shape[0], -1) * b.reshape(b.shape[0], -1).sin()).reshape(a.shape)

    captured = capture(lambda a, b: a * torch.sin(b + 1), [both.as_pass()], dynamic=True, aot=True)
    for size in (4, 9):
        a, b = torch.randn(size, 3, 8), torch.randn(size, 3, 8)
        close(captured(a, b), a * torch.sin(b + 1))
    assert len(captured.after) == 1 and captured.notes("changes", "both")


def test_symbolic_width_that_a_weight_fixes(capture, close):
    """dynamic=True marks the features too; the model's own linear has fixed them."""
    captured = capture(residual_of, [residual.as_pass()], dynamic=True)
    w = nn.Parameter(torch.randn(8, 8))
    for size in (4, 9):
        x = torch.randn(size, 8)
        close(captured(x, w), residual_of(x, w))
    assert captured.count(torch.addcmul) == len(captured.after) == 1


def test_branch_on_a_symbolic_size_is_refused(capture, close):
    @loka_compile.pattern(example=lambda: (torch.randn(4, 8),))
    def sine(a):
        return torch.sin(a)

    @sine.replace
    def _(a):
        return torch.sin(a) if a.shape[0] > 5 else torch.cos(a)

    captured = capture(torch.sin, [sine.as_pass()], dynamic=True)
    x = torch.randn(4, 8)
    close(captured(x), torch.sin(x))
    assert "symbolic size" in captured.refusals("sine")


@pytest.mark.parametrize("inside", [False, True])
def test_autocast(inside, capture, close):
    def forward(x, w):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return residual_of(x.clone(), w)

    captured = capture(forward if inside else residual_of, [residual.as_pass()])
    x, w = torch.randn(4, 8), nn.Parameter(torch.randn(8, 8))
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        got, want = captured(x, w), residual_of(x, w)
    if inside:
        want = forward(x, w)
    # addcmul promotes as the written form does.
    close(got, want, torch.bfloat16)
    assert captured.count(torch.addcmul) == 1


def test_another_dtype_at_the_match_is_refused(capture):
    @loka_compile.pattern(example=lambda: (torch.randn(4, 8),))
    def sine(a):
        return torch.sin(a)

    @sine.replace
    def _(a):
        return torch.sin(a.float())

    captured = capture(torch.sin, [sine.as_pass()])
    captured(torch.randn(3, dtype=torch.float64))
    assert "dtype torch.float32, the pattern's torch.float64" in captured.refusals("sine")


def test_vmap_is_left_alone(capture, close):
    captured = capture(lambda x: torch.vmap(F.silu)(x), [swish.as_pass()])
    x = torch.randn(4, 8)
    close(captured(x), F.silu(x))
    assert "functorch" in captured.refusals("swish")


def test_results_that_share_memory_are_copied(capture, close):
    @loka_compile.pattern(example=lambda: (torch.randn(4, 8),))
    def two(x):
        return torch.sin(x), torch.cos(x)

    @two.replace
    def _(x):
        both = torch.cat([torch.sin(x), torch.cos(x)], -1)
        return both.chunk(2, -1)

    def forward(x):
        a, b = torch.sin(x), torch.cos(x)
        return a.view(-1), b.add_(1)

    captured = capture(forward, [two.as_pass()])
    x = torch.randn(4, 8)
    for got, want in zip(captured(x), forward(x), strict=True):
        close(got, want)
    assert captured.count("clone") == 2 and captured.count(torch.cat) == 1


def test_no_early_reader_of_a_result(capture, close):
    """The second result's input is computed from the first result."""

    @loka_compile.pattern(example=lambda: (torch.randn(4, 8), torch.randn(4, 8)))
    def two(x, y):
        return torch.sin(x), torch.cos(y)

    @two.replace
    def _(x, y):
        return torch.sin(x), torch.cos(y)

    captured = capture(lambda x: torch.cos(torch.sin(x) + 1), [two.as_pass()])
    x = torch.randn(4, 8)
    close(captured(x), torch.cos(torch.sin(x) + 1))
    assert captured.notes("changes", "two") == []


def test_site_goes_with_the_weight(capture, close):
    @loka_compile.pattern(example=lambda: (torch.randn(4, 8), torch.randn(6, 8)))
    def squashed(x, w):
        return F.linear(x, w).tanh()

    @squashed.replace
    def _(x, w):
        return F.linear(F.linear(x, torch.eye(8)), w).tanh()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 6, bias=False)

        def forward(self, x):
            return self.up(x).tanh()

    model = Model()
    captured = capture(nn.Sequential(model), [squashed.as_pass()])
    x, w = torch.randn(4, 8), model.up.weight
    close(captured(x), F.linear(x, w).tanh())
    assert [n.meta.get(g.SITE) for n in captured.nodes(LINEAR)] == [None, "0.up"]
    assert [g.layer_of(n) for n in captured.nodes("tanh")] == ["0"]
    assert "no site" in captured.refusals("squashed")


def test_a_result_that_is_an_input_is_copied_where_that_is_written(capture, close):
    @loka_compile.pattern(example=lambda: (torch.randn(4, 8),))
    def doubled(x):
        return x * 1.0

    @doubled.replace
    def _(x):
        return x

    def forward(x):
        y = x * 1.0
        x.add_(1)
        return y + x

    captured = capture(forward, [doubled.as_pass()])
    x = torch.randn(4, 8)
    want = forward(x.clone())
    close(captured(x), want)
    assert captured.count(operator.mul) == 0 and captured.count("clone") == 1
    captured = capture(lambda x: x * 1.0 + 1, [doubled.as_pass()])
    close(captured(x), x + 1)
    assert captured.count(operator.mul) == captured.count("clone") == 0


def test_an_input_that_two_matches_share(capture, close):
    x, w = torch.randn(4, 8), torch.randn(8, 8)

    def forward(x, w):
        return residual_of(x, w) * (torch.tanh(x @ w) * x + x)

    captured = capture(forward, [residual.as_pass()])
    close(captured(x, w), forward(x, w))
    assert captured.count(torch.addcmul) == 2
