"""What a `when` may ask, what it may give, and what the report says of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import loka_compile
from loka_compile.errors import PatternError
from loka_compile.passes import matching as m

t = torch.randn


def sine(when=None, **more):
    @loka_compile.pattern(example=lambda: (t(4, 8),), **more)
    def sine(x):
        return torch.sin(x)

    if when is not None:
        sine.when(when)
    return sine


def test_when_gives_the_replacements_constants(capture, close):
    one = sine(
        lambda match: {"scale": float(match.shape("x")[-1]), "dtype": match.dtype("x")},
        says=lambda match: f"sine times {match.constants['scale']:g}",
        preserves=lambda match: match.constants["scale"] == 1.0,
    )

    @one.replace
    def _(x, *, dtype, scale):
        return (torch.cos(x) * scale).to(dtype)

    captured = capture(lambda x, y: (torch.sin(x), torch.sin(y)), [one.as_pass()])
    x, y = t(3, 5), t(3, 1)
    for got, want in zip(captured(x, y), (5 * x.cos(), y.cos()), strict=True):
        close(got, want)
    assert captured.notes("changes", "sine") == ["sine times 5"]
    assert captured.notes("rewrites", "sine") == ["sine times 1"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, r"gives \[\], the replacement takes \['scale'\]"),
        ({"scale": 1.0, "more": 2}, r"gives \['more', 'scale'\]"),
        (True, r"gives \[\]"),
        ("not today", "refuses its own example: not today"),
        ("", "refuses its own example: no"),
    ],
)
def test_constants_that_do_not_fit_are_told_when_it_is_made(given, why):
    one = sine(lambda match: given)
    one.replace(lambda x, *, scale: x * scale)
    with pytest.raises(PatternError, match=why):
        one.as_pass()


def test_constants_without_a_when():
    one = sine()
    one.replace(lambda x, *, scale: x * scale)
    with pytest.raises(PatternError, match="needs a `when` that gives scale"):
        one.as_pass()


def test_a_pattern_has_no_constants():
    one = loka_compile.pattern(example=lambda: (t(4), 2.0))(lambda x, *, scale: x * scale)
    one.replace(lambda x, scale: x)
    with pytest.raises(PatternError, match="only plain positional arguments"):
        one.as_pass()


@pytest.mark.parametrize("later", [False, True])
def test_it_says_what_writes_to_an_argument_later(later, capture):
    one = sine(lambda match: not (why := match.written_later("x")) or f"written by {why}")
    one.replace(lambda x: torch.cos(x))

    def forward(x):
        x = x + 1
        if not later:
            x.mul_(2)
        y = torch.sin(x)
        if later:
            x.view(-1).mul_(2)
        return y + x

    captured = capture(forward, [one.as_pass()])
    captured(t(3, 4))
    assert captured.refusals("sine") == ("written by mul_" if later else "")
    assert captured.count(torch.cos) == int(not later)


def test_it_looks_at_nodes_around_and_at_the_options(capture):
    def only_before_a_sum(match):
        (reader, *_) = match.result.users
        if not m.operands(reader, m.ADD):
            return ""
        assert match.options.block == 16
        return match.obstacle(match.node("x"), reader, [match.node("x")]) or True

    one = sine(only_before_a_sum)
    one.replace(lambda x: torch.cos(x))

    def forward(x, y):
        a, b = torch.sin(x), torch.sin(y)
        y.add_(1)
        return a + y, b + y, torch.sin(x) * x

    captured = capture(forward, [one.as_pass()], block=16)
    captured(t(3, 4), t(3, 4))
    assert captured.count(torch.cos) == 1
    assert "is written to in place in between" in captured.refusals("sine")


def test_a_use_is_told_under_the_linear_that_it_replaces(capture):
    @loka_compile.pattern(example=lambda: (t(4, 8), t(6, 8)))
    def squashed(x, w):
        return F.linear(x, w).tanh()

    @squashed.replace
    def _(x, w):
        return F.linear(x, w).sin()

    captured = capture(nn.Sequential(nn.Linear(8, 6, bias=False), nn.Tanh()), [squashed.as_pass()])
    captured(t(3, 8))
    (record,) = [r for r in captured.records if r.name == "squashed"]
    assert [note.where for note in record.changes] == ["0"]
