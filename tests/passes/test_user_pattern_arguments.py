"""Arguments of a pattern: constants, free numbers, optional tensors, dimensions from either end."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import loka_compile


def test_literals_must_agree(capture):
    @loka_compile.pattern(example=lambda: (torch.randn(4, 8),))
    def norm(x):
        return F.layer_norm(x, (8,)).relu()

    @norm.replace
    def _(x):
        return F.relu(F.rms_norm(x, (8,)))

    captured = capture(lambda x: F.relu(nn.LayerNorm(16)(x)), [norm.as_pass()])
    captured = capture(lambda x: F.layer_norm(x, [16]).relu(), [norm.as_pass()])
    captured(torch.randn(2, 16))
    assert "has 16 where the pattern has 8" in captured.refusals("norm")
    captured = capture(lambda x: F.layer_norm(x, normalized_shape=[8]).relu(), [norm.as_pass()])
    captured(torch.randn(2, 3, 8))
    assert captured.count(torch.rms_norm) == 1


def test_scalars_of_the_example_are_constants(capture):
    @loka_compile.pattern(example=lambda: (torch.randn(4, 8), 3.0, 2))
    def powers(x, factor, exponent):
        return factor * x**exponent

    @powers.replace
    def _(x, factor, exponent):
        return torch.square(x) * (factor * exponent / 2)

    for write, count in ((lambda x: x.pow(2) * 3.0, 1), (lambda x: x.pow(2) * 4.0, 0)):
        captured = capture(write, [powers.as_pass()])
        captured(torch.randn(5))
        assert captured.count(torch.square) == count
    assert "has 4.0 where the pattern has 3.0" in captured.refusals("powers")


def tanh_of(function):
    """A pattern that looks for tanh(function(x)) and marks it with a sine."""
    function.__name__ = "tanh_of"
    one = loka_compile.pattern(example=lambda: (torch.randn(4, 8),))(
        lambda x: torch.tanh(function(x))
    )
    one.name = "tanh_of"
    one.replace(lambda x: torch.sin(function(x)))
    return one.as_pass()


SAME = {
    "last-dim": (
        lambda x: x.softmax(-1),
        [lambda x: F.softmax(x, dim=x.dim() - 1), nn.Softmax(-1)],
    ),
    "first-dim": (lambda x: x.softmax(0), [lambda x: torch.softmax(x, -x.dim())]),
    "mean": (
        lambda x: x.mean(-1),
        [lambda x: torch.mean(x, [x.dim() - 1]), lambda x: x.mean((-1,))],
    ),
    "transpose": (
        lambda x: x.transpose(-2, -1),
        [
            lambda x: x.transpose(x.dim() - 1, -2),
            lambda x: torch.transpose(x, x.dim() - 2, -1),
        ],
    ),
    "stack": (lambda x: torch.stack([x, x], -1), [lambda x: torch.stack((x, x), dim=x.dim())]),
    "cat": (lambda x: torch.cat([x, x], 1), [lambda x: torch.cat((x, x), dim=1 - x.dim())]),
    "unsqueeze": (lambda x: x.unsqueeze(-1), [lambda x: torch.unsqueeze(x, x.dim())]),
    "cast": (
        lambda x: x.to(torch.float64),
        [
            lambda x: x.double(),
            lambda x: x.to(dtype=torch.float64),
            lambda x: x.type(torch.float64),
        ],
    ),
}


OTHER = {
    "last-dim": lambda x: x.softmax(0),
    "mean": lambda x: x.mean(0),
    "cast": lambda x: x.to(torch.float16),
    "stack": lambda x: torch.stack([x, x], 0),
}


@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 8)])
@pytest.mark.parametrize("name", SAME)
def test_dimensions_from_either_end_and_casts(name, shape, capture):
    looked_for, written = SAME[name]
    one = tanh_of(looked_for)
    x = torch.randn(shape)
    for write in (*written, looked_for):
        captured = capture(lambda x, write=write: torch.tanh(write(x)), [one])
        assert torch.allclose(captured(x), torch.sin(write(x)))
        assert captured.count("sin", torch.sin) == 1
    if name in OTHER:
        captured = capture(lambda x: torch.tanh(OTHER[name](x)), [one])
        captured(x)
        assert captured.count("sin", torch.sin) == 0


def test_an_optional_argument_is_none_in_the_pattern_only_where_it_is_none(capture, close):
    """`b=None` in the example: a linear without bias; one that has a bias is another pattern."""

    @loka_compile.pattern(example=lambda: (torch.randn(4, 8), torch.randn(6, 8), None))
    def squash(x, w, b):
        return F.linear(x, w, b).tanh()

    @squash.replace
    def _(x, w, b):
        return F.linear(x, w, b).sin()

    plain, biased = nn.Linear(8, 6, bias=False), nn.Linear(8, 6)
    captured = capture(lambda x: plain(x).tanh() + biased(x).tanh(), [squash.as_pass()])
    x = torch.randn(3, 8)
    close(captured(x), plain(x).sin() + biased(x).tanh())
    assert captured.count("sin") == 1 and captured.count("tanh") == 1


@loka_compile.pattern(
    example=lambda: (torch.randn(4, 48), torch.randn(48), 48, 1e-3), free=("n", "eps")
)
def norm_of_any_width(x, w, n, eps):
    return F.layer_norm(x, (n,), w, None, eps).relu()


@norm_of_any_width.replace
def _(x, w, n, eps):
    return F.rms_norm(x, (n,), w, eps).relu() * (n / 2)


@norm_of_any_width.when
def _(match):
    return match.number("n") != 20 or f"{match.layer} is left alone"


@pytest.mark.parametrize("shape", [(4, 16), (2, 3, 10)])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_a_free_number_is_any_number_and_the_replacement_gets_it(shape, eps, capture, close):
    n = shape[-1]
    norm = nn.LayerNorm(n, eps=eps, bias=False)
    captured = capture(lambda x: F.relu(norm(x)), [norm_of_any_width.as_pass()])
    x = torch.randn(shape)
    close(captured(x), F.relu(F.rms_norm(x, (n,), norm.weight, eps)) * (n / 2))


def test_free_numbers_say_what_they_are_to_when(capture):
    model = nn.Sequential(nn.LayerNorm(20, bias=False), nn.ReLU())
    captured = capture(model, [norm_of_any_width.as_pass()])
    captured(torch.randn(2, 20))
    assert captured.count(torch.rms_norm) == 0
    assert captured.refusals("norm_of_any_width") == "1 is left alone"


def test_one_free_number_in_two_places_is_one_number(capture):
    @loka_compile.pattern(example=lambda: (torch.randn(4), 3.0), free="a")
    def shifted(x, a):
        return (x * a).sin() + a

    @shifted.replace
    def _(x, a):
        return torch.cos(x * a)

    for write, count in (
        (lambda x: torch.sin(5.0 * x) + 5.0, 1),
        (lambda x: (x * 5.0).sin() + 4.0, 0),
    ):
        captured = capture(write, [shifted.as_pass()])
        captured(torch.randn(5))
        assert captured.count(torch.cos) == count
    assert "has 4.0 where the pattern has 5.0" in captured.refusals("shifted")


@pytest.mark.parametrize(
    ("free", "why"),
    [
        ("nothing", "free='nothing' is no argument"),
        ("x", "must be an int or a float"),
        (("a", "b"), "'a' and 'b' are both 2.0"),
        ("c", "7.0, free as 'c', is not in the pattern"),
    ],
)
def test_what_cannot_be_free(free, why):
    one = loka_compile.pattern(example=lambda: (torch.randn(4), 2.0, 2.0, 7.0), free=free)(
        lambda x, a, b, c: x * a + b
    )
    one.name = "free"
    one.replace(lambda x, a, b, c: x * a)
    with pytest.raises(loka_compile.errors.PatternError, match=why):
        one.as_pass()
