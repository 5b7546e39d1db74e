"""Optional arguments and free shapes: one pattern for all of a call's forms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import loka_compile
from loka_compile.errors import PatternError

t = torch.randn


@loka_compile.pattern(
    example=lambda: (t(4, 8), (8,), t(8), t(8), 1e-3),
    free=("shape", "eps"),
    optional=("w", "b"),
)
def norm(x, shape, w, b, eps):
    return F.layer_norm(x, shape, w, b, eps)


@norm.replace
def _(x, shape, w, b, eps):
    y = F.rms_norm(x, shape, w, eps)
    return y if b is None else y - b


@pytest.mark.parametrize("shape", [(6,), (3, 6)])
@pytest.mark.parametrize(("gain", "bias"), [(True, True), (True, False), (False, False)])
def test_every_form_of_a_norm(shape, gain, bias, capture, close):
    one = nn.LayerNorm(shape, eps=0.01, elementwise_affine=gain, bias=bias)
    for p in one.parameters():
        nn.init.normal_(p)
    captured = capture(one, [norm.as_pass()])
    x = t(2, 3, 6)
    want = F.rms_norm(x, shape, one.weight, 0.01)
    close(captured(x), want if one.bias is None else want - one.bias)
    assert captured.count(F.layer_norm) == 0


def test_left_out_is_told_from_given(capture):
    @loka_compile.pattern(example=lambda: (t(4, 8), t(6, 8), t(6)), optional="b")
    def linear(x, w, b):
        return F.linear(x, w, b).tanh()

    @linear.replace
    def _(x, w, b):
        return F.linear(x, w, b).sin()

    @linear.when
    def _(match):
        if not match.given("b"):
            with pytest.raises(KeyError, match="no argument 'b'; here are x, w"):
                match.node("b")
        return not match.given("b") or f"a bias of {tuple(match.shape('b'))}"

    plain, biased = nn.Linear(8, 6, bias=False), nn.Linear(8, 6)
    captured = capture(lambda x: plain(x).tanh() + biased(x).tanh(), [linear.as_pass()])
    captured(t(3, 8))
    assert captured.count("sin") == captured.count("tanh") == 1
    assert captured.refusals("linear") == "a bias of (6,)"


def test_one_optional_argument_in_two_places_is_one(capture):
    @loka_compile.pattern(example=lambda: (t(4, 8), t(8)), optional="w")
    def twice(x, w):
        return F.rms_norm(torch.tanh(F.rms_norm(x, (8,), w, 1e-3)), (8,), w, 1e-3)

    @twice.replace
    def _(x, w):
        return torch.cos(x)

    gain, other = nn.Parameter(t(8)), nn.Parameter(t(8))
    for first, second, count in (
        (None, None, 1),
        (gain, gain, 1),
        (gain, other, 0),
        (gain, None, 0),
    ):
        captured = capture(
            lambda x, a=first, b=second: (
                twice.function(x, a)
                if a is b
                else F.rms_norm(torch.tanh(F.rms_norm(x, (8,), a, 1e-3)), (8,), b, 1e-3)
            ),
            [twice.as_pass()],
        )
        captured(t(3, 8))
        assert captured.count(torch.cos) == count


@pytest.mark.parametrize(
    ("function", "example", "optional", "why"),
    [
        (
            lambda x, b: x.sin() if b is None else x.sin() + b,
            (t(4), t(4)),
            "b",
            "optional='b': the pattern must pass it on to one op as it is",
        ),
        (
            lambda x, b: (x + b).sin(),
            (t(4), t(4)),
            "b",
            "with b=None, the pattern cannot",
        ),
        (lambda x, b: x * b, (t(4), 2.0), "b", "optional='b' is no tensor argument"),
        (lambda x, b: x * b, (t(4), t(4)), "c", "optional='c' is no tensor argument"),
    ],
)
def test_what_cannot_be_optional(function, example, optional, why):
    one = loka_compile.pattern(example=lambda: example, optional=optional)(function)
    one.replace(lambda x, b: x)
    with pytest.raises(PatternError, match=why):
        one.as_pass()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_shape_that_is_a_graph_input_is_a_near_miss(dynamic, capture):
    captured = capture(lambda x: F.layer_norm(x, (x.shape[-1],)), [norm.as_pass()], dynamic=dynamic)
    captured(t(3, 8))
    assert ("shape is a graph input, not a literal" in captured.refusals("norm")) == dynamic
