"""Recording a function sees what Dynamo sees, or declines."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from loka_compile.passes import block_norm
from loka_compile.passes import hard_swish
from loka_compile.passes import strip_bias
from loka_compile.passes.pattern_direct import record
from loka_compile.passes.pattern_trace import recorded
from loka_compile.passes.pattern_trace import stand_ins_of
from loka_compile.passes.pattern_trace import trace

t = torch.randn
BLOCK = torch.ops.loka.block_norm.default
MODS = (strip_bias.STRIP_BIAS, block_norm.BLOCK_NORMS, hard_swish.HARD_SWISH)
BUILT_IN = {
    f"{mod.name}.{op}.{which}": (function, one)
    for mod in MODS
    for op, one in mod.patterns.items()
    for which, function in (("pattern", one.function), ("replacement", one.replacement))
}


def mlp(x, w, b):
    return F.gelu(F.linear(x, w, b), approximate="tanh") * 2.0


def cross(x, w, b):
    y = x * torch.sigmoid(x @ w.transpose(0, 1) + b.square().mean())
    return torch.cat([y, -y], -1), F.softmax(y, dim=-1) ** 2


def choose(x, w, b):
    y = F.relu(x).reshape(-1, 8)
    return y if b is None else F.relu6(y) + F.hardswish(b)


def blocks(x, w, b):
    return BLOCK(x, b, 4, 1e-5)[0].float() / 3


WRITTEN = [mlp, cross, choose, blocks]


def calls_of(traced, values):
    """(target, arguments, result) of each canonical call, inputs by their position."""
    gm, sources = traced.copy(values)
    names = {n: f"argument {position}" for n, (position, _) in sources.items()}
    found = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        args = str(fx.map_arg((node.args, node.kwargs), lambda n: names[n]))
        names[node] = f"call {len(found)}"
        value = node.meta.get("example_value")
        form = (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None
        found.append((node.target, args, form))
    return found


def check(function, values):
    ours, theirs = recorded(function, values), trace(function, values)
    assert ours is not None
    for parameters in (False, True):
        fakes = stand_ins_of(values, parameters=parameters)
        assert calls_of(ours, fakes) == calls_of(theirs, fakes)


@pytest.mark.parametrize("function", WRITTEN)
def test_it_sees_what_dynamo_sees(function):
    check(function, (t(4, 8), t(8, 8), t(8)))


def test_a_branch_on_none_is_taken():
    check(choose, (t(4, 8), t(8, 8), None))


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_built_in_ones(name):
    function, one = BUILT_IN[name]
    values = list(one.example())
    if name.startswith("block_norm") and "replacement" in name:
        values += [8, torch.float32]
    check(function, values)


def helper(x):
    return x.sin()


SIZE = 3


def writes(x, w, b):
    x += 1
    return x


def in_place(x, w, b):
    return F.relu(x, inplace=True)


def item(x, w, b):
    x[0] = 1.0
    return x.sin()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: x.reshape(x.shape[0], -1),
        lambda x, w, b: x * x.shape[-1],
        lambda x, w, b: x.to(w.dtype),
        lambda x, w, b: helper(x),
        lambda x, w, b: torch.sin(x) if isinstance(x, torch.Tensor) else torch.cos(x),
        lambda x, w, b: torch.sin(x) if torch.is_grad_enabled() else torch.cos(x),
        lambda x, w, b: torch.sin(x) if torch.is_tensor(x) else torch.cos(x),
        lambda x, w, b: x * SIZE,
        lambda x, w, b: x + torch.ones(8),
        lambda x, w, b: torch.stack([v.sin() for v in x]),
        lambda x, w, b: torch.sin(x) if x.mean() > 0 else x,
        lambda x, w, b: torch.nn.functional.dropout(x, 0.5),
        writes,
        in_place,
        item,
    ],
)
def test_what_dynamo_has_to_look_at(function):
    assert record(function, (t(4, 8), t(8, 8), t(8))) is None


def test_a_comprehension_over_arguments():
    """Before Python 3.12 it is a function of its own; since then its loop is in plain sight."""

    def function(x, w, b):
        return torch.stack([v.sin() for v in (x, w)])

    values = (t(8, 8), t(8, 8), t(8))
    if sys.version_info >= (3, 12):
        check(function, values)
    else:
        assert record(function, values) is None


def test_a_closure_is_looked_at_by_dynamo():
    scale = 3.0
    assert record(lambda x: x * scale, (t(4, 8),)) is None
