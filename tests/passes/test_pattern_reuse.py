"""Equal layers share one graph of the replacement; each match has values of its own."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import loka_compile
from loka_compile.passes import graph as g
from loka_compile.passes.aliases import storages
from loka_compile.passes.pattern_trace import Traced
from loka_compile.passes.pattern_trace import propagate

t = torch.randn


def pass_of(pattern, replacement, *example):
    one = loka_compile.pattern(example=lambda: example)(pattern)
    one.replace(replacement)
    return one.as_pass()


LINEAR = pass_of(
    lambda x, w: F.relu(F.linear(x, w)), lambda x, w: F.relu6(F.linear(x, w)), t(4, 8), t(6, 8)
)
SINE = pass_of(lambda x: torch.sin(x), lambda x: torch.tanh(x), t(4, 8))
#: Its result is a view of a value of its own.
TURNED = pass_of(lambda x: torch.sin(x), lambda x: torch.tanh(x.mT).mT, t(4, 8))


@pytest.fixture
def copies(monkeypatch):
    """How many graphs of replacements were made."""
    made, copy = [], Traced.copy

    def counted(self, values):
        made.append(self)
        return copy(self, values)

    monkeypatch.setattr(Traced, "copy", counted)
    return made


def layers(*widths):
    pairs = itertools.pairwise(widths)
    found = [m for a, b in pairs for m in (nn.Linear(a, b, bias=False), nn.ReLU())]
    return nn.Sequential(*found)


def check_values(captured):
    """Every value is of the form that running the graph gives, in memory of nobody else's."""
    for gm in captured.after:
        nodes = [n for n in gm.graph.nodes if isinstance(g.value(n), torch.Tensor)]
        calls = [n for n in nodes if n.op != "placeholder"]
        kept = {n: g.value(n) for n in calls}
        propagate(gm, [g.value(n) for n in nodes])
        for node, old in kept.items():
            new = g.value(node)
            for what in ("shape", "dtype", "device", "requires_grad"):
                assert getattr(old, what) == getattr(new, what), (node, what)
            assert old.stride() == new.stride(), node
            node.meta["example_value"] = old
        views = [n for n in calls if n.target in ("mT", getattr)]
        owned = [k for n in calls if n not in views for k in storages(g.value(n))]
        assert len(owned) == len(set(owned))


@pytest.mark.parametrize("dynamic", [False, True])
def test_equal_layers_share_one_graph(dynamic, capture, copies, close):
    model = layers(8, 8, 8, 8, 6, 8)
    captured = capture(model, [LINEAR], dynamic=dynamic)
    x = t(5, 8)
    want = x
    for linear in model[::2]:
        want = F.relu6(F.linear(want, linear.weight))
    close(captured(x), want)
    assert len(captured.notes("changes")) == 5
    # 8 -> 8, 8 -> 6, 6 -> 8; the first input needs no gradient.
    assert len(copies) == 4
    check_values(captured)


def test_a_parameter_and_a_computed_weight_do_not(capture, copies, close):
    w = nn.Parameter(t(8, 8))
    captured = capture(lambda x, v: F.relu(F.linear(x, w)) + F.relu(F.linear(x, v)), [LINEAR])
    x, v = t(5, 8), t(8, 8, requires_grad=True)
    close(captured(x, v), F.relu6(F.linear(x, w)) + F.relu6(F.linear(x, v)))
    assert len(copies) == 2


@pytest.mark.parametrize("inner", [torch.bfloat16, torch.float32])
def test_nor_do_two_autocast_regions(inner, capture, close):
    w = nn.Parameter(t(8, 8))

    def forward(x):
        y = F.relu(F.linear(x, w))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inner is torch.bfloat16):
            z = F.relu(F.linear(x, w))
        return y, z

    captured = capture(forward, [LINEAR])
    y, z = captured(t(5, 8))
    assert (y.dtype, z.dtype) == (torch.float32, inner)
    assert len(captured.notes("changes")) == 2
    check_values(captured)


@pytest.mark.parametrize("one", [SINE, TURNED])
def test_values_stay_apart_where_results_are_views(one, capture, close):
    def forward(x):
        return [torch.sin(x + i) for i in range(4)]

    captured = capture(forward, [one])
    x = t(5, 8)
    for i, got in enumerate(captured(x)):
        close(got, torch.tanh(x + i))
    assert len(captured.notes("changes")) == 4
    check_values(captured)


def test_a_result_that_others_write_to_stays_its_own(capture, close):
    def forward(x):
        a, b = torch.sin(x), torch.sin(x + 1)
        a.add_(1)
        return a, b

    captured = capture(forward, [SINE])
    x = t(5, 8)
    a, b = captured(x)
    close(a, torch.tanh(x) + 1)
    close(b, torch.tanh(x + 1))


def test_two_passes_over_two_graphs(capture, close):
    """Values of one graph are of no use in another: sizes may be symbols of its own."""
    for rows in (5, 7):
        captured = capture(layers(8, 8, 8), [LINEAR], dynamic=True)
        assert captured(t(rows, 8)).shape == (rows, 8)
        assert len(captured.notes("changes")) == 2
        check_values(captured)
