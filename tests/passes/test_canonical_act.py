"""Swish in all spellings, sigmoid, and dropouts that do nothing."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

SPELLINGS = [
    nn.SiLU(),
    F.silu,
    lambda x: x * torch.sigmoid(x),
    lambda x: torch.sigmoid(x) * x,
    lambda x: x * x.sigmoid(),
    lambda x: torch.mul(F.sigmoid(x), x),
    lambda x: x.mul(torch.sigmoid(x)),
]


@pytest.mark.parametrize("index", range(len(SPELLINGS)))
def test_swish(index, capture, close):
    fn = SPELLINGS[index]
    captured = capture(fn)
    x = torch.randn(4, 5)
    close(captured(x), fn(x))
    (node,) = captured.nodes(F.silu)
    assert len(node.args) == 1
    assert not node.kwargs
    assert captured.count(torch.sigmoid, operator.mul) == 0


def test_sigmoid_has_one_spelling(capture, close):
    captured = capture(lambda x: F.sigmoid(x) + x.sigmoid() + torch.sigmoid(x))
    x = torch.randn(4)
    close(captured(x), 3 * torch.sigmoid(x))
    assert captured.count(torch.sigmoid) == 3


LEFT = {
    "other": (lambda x, y: x * torch.sigmoid(y), None),
    "reader": (lambda x, y: (s := torch.sigmoid(x)) * x + s, "other readers"),
    "dtype": (lambda x, y: x * torch.sigmoid(x.bfloat16()), None),
    "scaled": (lambda x, y: x * torch.sigmoid(1.702 * x), None),
}


@pytest.mark.parametrize("name", LEFT)
def test_products_that_are_no_swish(name, capture, close):
    fn, why = LEFT[name]
    captured = capture(fn)
    x, y = torch.randn(4), torch.randn(4)
    close(captured(x, y), fn(x, y))
    assert captured.count(F.silu) == 0
    assert why is None or why in captured.refusals()


def test_swish_across_a_write(capture, close):
    def forward(x):
        s = torch.sigmoid(x)
        x += 1
        return x * s

    captured = capture(forward)
    mine = torch.randn(4)
    theirs = mine.clone()
    close(captured(mine), forward(theirs))
    assert captured.count(F.silu) == 0


def test_inplace_silu_on_a_fresh_value(capture, close):
    captured = capture(lambda x: F.silu(x + 1, inplace=True))
    x = torch.randn(4)
    close(captured(x), F.silu(x + 1))
    assert not captured.nodes(F.silu)[0].kwargs


def test_inplace_silu_before_a_swish_written_out(capture, close):
    """The write is gone from the graph; what looks for writes later must not meet it."""

    def forward(x):
        return F.silu(x + 1, inplace=True) + x * torch.sigmoid(x)

    captured = capture(forward)
    x = torch.randn(4)
    close(captured(x), forward(x))
    assert captured.count(F.silu) == 2


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: (F.silu(x, inplace=True), x)[0],
        lambda x: ((h := x + 1), F.silu(h, inplace=True), h * 2)[2],
        lambda x: ((h := x + 1), F.silu(h[1:], inplace=True), h * 2)[2],
        lambda x: ((h := (x + 1).view(2, 2)), (v := h.view(-1)), F.silu(h, inplace=True), v)[3],
    ],
)
def test_inplace_silu_that_others_see(forward, capture, close):
    captured = capture(forward)
    mine = torch.randn(4)
    theirs = mine.clone()
    close(captured(mine), forward(theirs))
    close(mine, theirs)
    assert "silu in place -> silu and a copy" in captured.notes("rewrites")
    (silu,) = captured.nodes(F.silu)
    assert not silu.kwargs


def test_gradients_of_an_inplace_silu_that_others_see(capture, close):
    def forward(x):
        h = x + 1
        F.silu(h, inplace=True)
        return (h * h).sum()

    grads = []
    for run in (forward, capture(forward, aot=True)):
        x = torch.linspace(-2, 2, 7, requires_grad=True)
        run(x).backward()
        grads.append(x.grad)
    close(grads[1], grads[0])


@pytest.mark.parametrize(
    "dropout",
    [
        nn.Dropout(0.0),
        nn.Dropout(0.5).eval(),
        lambda x: F.dropout(x, 0.5, False),
        lambda x: F.dropout(x, p=0, training=True),
        lambda x: torch.dropout(x, 0.5, False),
        lambda x: F.dropout(x, 0.5, training=False, inplace=True),
    ],
)
def test_inactive_dropout_is_its_input(dropout, capture, close):
    """Also under later in-place edits: eager hands the input itself through."""

    def forward(x, w):
        y = dropout(x)
        y += 1
        z = y.view(-1)
        z.mul_(2)
        return F.linear(y, w)

    captured = capture(forward)
    mine, w = torch.randn(4, 3), torch.randn(5, 3)
    theirs = mine.clone()
    close(captured(mine, w), forward(theirs, w))
    close(mine, theirs)
    assert captured.count(F.dropout, torch.dropout) == 0


def test_aliases_survive_a_removed_dropout(capture, close):
    """A write through a view of the dropped dropout still counts as a write to its input."""
    linear, norm = nn.Linear(4, 4, bias=False), nn.RMSNorm(4)

    def forward(x):
        view = F.dropout(x, 0.5, False).view(-1)
        h = linear(x)
        view.mul_(2)
        return norm(h) + x

    captured = capture(forward, "mods")
    mine = torch.randn(3, 4)
    theirs = mine.clone()
    close(captured(mine), forward(theirs))
    assert captured.count(torch.ops.loka.linear_block_norm_act.default) == 0


def test_active_dropout_stays(capture):
    captured = capture(lambda x: F.dropout(x, 0.5, True))
    captured(torch.randn(4))
    assert captured.count(F.dropout) == 1


def test_dropout_whose_rate_is_a_graph_input_stays(capture):
    captured = capture(nn.Dropout(0.0).train(), dynamic=True)
    x = torch.randn(4)
    assert torch.equal(captured(x), x)
