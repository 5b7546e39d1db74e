"""One trace of a replacement serves all sizes, but only where no size shows in it."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import loka_compile
from loka_compile.passes import pattern_reuse

t = torch.randn


def pass_of(pattern, replacement, *example):
    one = loka_compile.pattern(example=lambda: example)(pattern)
    one.replace(replacement)
    return one.as_pass()


@pytest.fixture
def traces(monkeypatch):
    """(any size, or one) of each trace of a replacement."""
    made, trace = [], pattern_reuse.trace

    def counted(function, values, *, any_size=False):
        made.append("any" if any_size else "one")
        return trace(function, values, any_size=any_size)

    monkeypatch.setattr(pattern_reuse, "trace", counted)
    # What can be recorded without Dynamo is not traced at all.
    monkeypatch.setattr(pattern_reuse, "recorded", lambda function, values: None)
    return made


def test_layers_of_all_widths_share_one_trace(capture, traces, close):
    def linear_relu(x, w, b):
        return F.relu(F.linear(x, w, b))

    def linear_relu6(x, w, b):
        return F.relu6(F.linear(x, w, b))

    one = pass_of(linear_relu, linear_relu6, t(4, 8), t(6, 8), t(6))
    widths = (8, 12, 12, 16, 8, 20)
    linears = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def run(x, act):
        for linear in linears:
            x = act(linear(x))
        return x

    with torch.no_grad():
        for rows, dynamic in ((4, False), (7, True)):
            captured = capture(lambda x: run(x, F.relu), [one], dynamic=dynamic)
            x = t(rows, 8)
            close(captured(x), run(x, F.relu6))
            assert len(captured.notes("changes")) == 5
    # One where grad is enabled, for the example, and one without, for two batches and all widths.
    assert traces == ["any", "any"]


def test_a_branch_on_a_width_is_taken_for_each(capture, traces, close):
    def sine(x):
        return torch.sin(x)

    def branching(x):
        return torch.tanh(x) if x.shape[-1] % 16 == 0 else torch.cos(x)

    one = pass_of(sine, branching, t(4, 32))
    captured = capture(lambda *xs: [torch.sin(x) for x in xs], [one])
    a, b, c = t(4, 32), t(4, 48), t(4, 20)
    for got, want in zip(captured(a, b, c), (a.tanh(), b.tanh(), c.cos()), strict=True):
        close(got, want)
    assert traces == ["any", "one"]


def test_sizes_that_are_equal_by_chance_are_two(capture, traces, close):
    def product(x, w):
        return torch.sin(x) @ w

    def square(x, w):
        return (torch.cos(x) if w.shape[0] == w.shape[1] else torch.tanh(x)) @ w

    one = pass_of(product, square, t(8, 8), t(8, 8))
    captured = capture(lambda x, v, w: (torch.sin(x) @ v, torch.sin(x) @ w), [one])
    x, v, w = t(5, 6), t(6, 6), t(6, 9)
    for got, want in zip(captured(x, v, w), (x.cos() @ v, x.tanh() @ w), strict=True):
        close(got, want)
    assert traces == ["any", "one"]


@pytest.mark.parametrize("inner", [False, True])
def test_a_size_that_is_read_stays_a_number(inner, capture, traces, close):
    def sine(x):
        return torch.sin(x)

    def scaled(x):
        return torch.sin(x) * (torch.cos(x) if inner else x).shape[-1]

    one = pass_of(sine, scaled, t(4, 8))
    captured = capture(lambda x, y: (torch.sin(x), torch.sin(y)), [one])
    x, y = t(4, 8), t(4, 12)
    for got, want in zip(captured(x, y), (8 * x.sin(), 12 * y.sin()), strict=True):
        close(got, want)
    assert captured.count("size") == 0
    assert traces == ["any", "one", "one"]


@pytest.mark.parametrize(
    ("make", "kind"),
    [(lambda: t(8, 4).t(), "one"), (lambda: t(4, 1), "any"), (lambda: t(0, 8), "any")],
)
def test_layouts_and_small_sizes_have_their_own(make, kind, capture, traces, close):
    def sine(x):
        return torch.sin(x)

    def by_form(x):
        return torch.tanh(x) if x.is_contiguous() and x.numel() > 8 else torch.cos(x)

    one = pass_of(sine, by_form, t(4, 8))
    captured = capture(torch.sin, [one])
    x = make()
    close(captured(x), x.cos())
    assert traces == ["any", kind]
    assert len(captured.notes("changes")) == 1
