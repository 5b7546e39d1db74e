"""Strange patterns: each matches, is refused with its reason, or says at once what it cannot be."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import loka_compile
from loka_compile.errors import PatternError

t = torch.randn
NAN = float("nan")


def make(pattern, replacement, example=lambda: (t(4, 8),), when=None):
    pattern.__name__ = "odd"
    one = loka_compile.pattern(example=example)(pattern)
    one.replace(replacement)
    if when is not None:
        one.when(when)
    return one.as_pass()


def without_grad(a):
    with torch.no_grad():
        b = torch.sin(a)
    return b * a


def in_bf16(a):
    with torch.autocast("cpu", torch.bfloat16):
        b = a @ a.t()
    return b.float()


def gated(a):
    left, right = a.chunk(2, -1)
    return left * torch.sigmoid(right)


SAME = {
    "slice": (lambda a: torch.sin(a[..., :4]), lambda a: torch.sin(a)[..., :4]),
    "keyword string": (
        lambda a: F.gelu(a, approximate="tanh"),
        lambda a: F.gelu(a, approximate="tanh") + 0,
    ),
    "infinity": (lambda a: torch.clamp(a, -math.inf, 1.0), lambda a: torch.clamp(a, max=1.0)),
    "nan": (lambda a: torch.nan_to_num(a, NAN), lambda a: torch.nan_to_num(a, NAN) + 0),
    "constant tensor": (lambda a: a * torch.tensor(3.0), lambda a: a * 3.0),
    "parts of a chunk": (gated, lambda a: F.glu(a, -1)),
    "itself twice": (torch.relu, lambda a: torch.relu(torch.relu(a))),
    "detached": (lambda a: torch.sin(a.detach()), lambda a: torch.sin(a).detach()),
    "no grad in the replacement": (lambda a: torch.sin(a) * a, without_grad),
    "scalar result": (lambda a: a.exp().sum(), lambda a: a.exp().sum(-1).sum()),
}


@pytest.mark.parametrize("rows", [4, 0])
@pytest.mark.parametrize("name", SAME)
def test_it_matches_and_computes_the_same(name, rows, capture, close):
    pattern, replacement = SAME[name]
    looked_for = pattern if name != "itself twice" else lambda a: torch.relu(a)
    one = make(lambda a: looked_for(a), replacement)
    captured = capture(lambda x: looked_for(x + 1) * 2, [one])
    x = torch.randn(rows, 8)
    close(captured(x), looked_for(x + 1) * 2)
    assert len(captured.notes("changes")) == 1


def test_autocast_in_the_replacement(capture, close):
    one = make(lambda a: a @ a.t(), in_bf16)
    captured = capture(lambda x: (x + 1) @ (x + 1).t(), [one])
    captured = capture(lambda x: (lambda h: h @ h.t())(x + 1), [one])
    x = torch.randn(4, 8)
    close(captured(x), in_bf16(x + 1))
    assert len(captured.notes("changes")) == 1


def test_defaults_of_the_pattern_are_its_example_too(capture, close):
    def squash(x, w, b=None):
        return F.linear(x, w, b).tanh()

    def squashed(x, w, b=None):
        return F.linear(x, w, b).sin()

    one = make(squash, squashed, lambda: (t(4, 8), t(6, 8)))
    w = torch.randn(6, 8)
    captured = capture(lambda x, w: F.linear(x, w).tanh(), [one])
    x = torch.randn(3, 8)
    close(captured(x, w), F.linear(x, w).sin())


def test_an_example_of_one_tensor_needs_no_tuple(capture, close):
    one = make(lambda a: torch.sin(a), lambda a: torch.cos(a), lambda: t(4, 8))
    captured = capture(torch.sin, [one])
    x = torch.randn(2, 3)
    close(captured(x), torch.cos(x))


@pytest.mark.parametrize("answer", ["", None, False, 0])
def test_whatever_is_not_true_is_a_no(answer, capture, close):
    one = make(lambda a: torch.sin(a), lambda a: torch.cos(a), when=lambda match: answer)
    captured = capture(torch.sin, [one])
    x = torch.randn(2, 3)
    close(captured(x), torch.sin(x))
    # An empty reason is one, and not worth a word.
    assert captured.refusals() == ("" if answer == "" else "its `when` said no")


@pytest.mark.parametrize("pattern", [without_grad, in_bf16])
def test_a_pattern_may_not_switch_modes(pattern):
    with pytest.raises(PatternError, match="switches grad or autocast modes"):
        make(lambda a: pattern(a), lambda a: torch.sin(a) * a)


def test_an_example_that_raises_says_so():
    def example():
        raise ValueError("boom")

    with pytest.raises(PatternError, match="its example raises ValueError: boom"):
        make(lambda a: a.sin(), lambda a: a.cos(), example)


def test_a_replacement_that_raises_at_a_match_is_a_near_miss(capture, close):
    def replacement(a):
        if a.dtype == torch.float64:
            raise TypeError("not in double")
        return torch.cos(a)

    captured = capture(torch.sin, [make(lambda a: torch.sin(a), replacement)])
    x = torch.randn(3, dtype=torch.float64)
    close(captured(x), torch.sin(x))
    assert "the replacement cannot be traced" in captured.refusals()


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (lambda x: (x + 1).transpose(0, 1), "leaves the graph and shares memory"),
        (lambda x: (lambda h: h.transpose(0, 1).add_(1) + h.t())(x + 1), "that add_"),
    ],
)
def test_a_view_whose_memory_shows_is_left(write, why, capture, close):
    one = make(lambda a: a.transpose(0, 1), lambda a: a.clone().permute(1, 0))
    captured = capture(write, [one])
    x = torch.randn(3, 3)
    close(captured(x), write(x))
    assert why in captured.refusals()


def test_a_size_of_an_argument_is_the_examples_number(capture, close):
    """The document says so: -1 or unflatten match any batch, `x.shape[0]` only the example's."""
    fixed = make(lambda a: a.view(a.shape[0], 2, -1).sin(), lambda a: a.unflatten(-1, (2, 4)).cos())
    free = make(lambda a: a.view(-1, 2, 4).sin(), lambda a: a.unflatten(-1, (2, 4)).cos())
    x = torch.randn(5, 8)
    captured = capture(lambda x: x.view(x.shape[0], 2, -1).sin(), [fixed])
    close(captured(x), x.view(5, 2, 4).sin())
    assert "has 5 where the pattern has 4" in captured.refusals()
    captured = capture(lambda x: x.view(-1, 2, 4).sin(), [free])
    close(captured(x), x.view(5, 2, 4).cos())


def test_a_long_sum_with_a_late_mismatch_takes_no_long_search(capture):
    """Every `+` may match in two orders: 2 ** 20 ways, if each were tried to its end."""

    def total(x, n, last):
        y = last(x)
        for i in range(1, n):
            y = y + torch.sin(x * i)
        return torch.tanh(y)

    one = make(lambda a: total(a, 20, torch.exp), lambda a: a + 0)
    captured = capture(lambda x: total(x, 20, torch.cos), [one])
    captured(torch.randn(4, 8))
    (record,) = [r for r in captured.records if r.name == "odd"]
    assert record.matches == 0 and record.ms < 2000
