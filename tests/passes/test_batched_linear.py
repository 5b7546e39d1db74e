"""A linear over a transposed input becomes a batched product, value and gradients unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loka_compile.options import Options
from loka_compile.passes import graph as g
from loka_compile.passes.batched_linear import BatchedLinear
from loka_compile.passes.canonicalize import Canonicalize
from loka_compile.passes.dispatch import Dispatch
from loka_compile.passes.manager import PassContext
from loka_compile.passes.manager import run_pass
from loka_compile.passes.observe import Observe


class Mix(nn.Module):
    """(B, n, d) -> over n; `back` says what is done to the result."""

    def __init__(self, forward, n: int = 6, m: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, m, dtype=torch.float64))
        self.linear = nn.Linear(n, m, bias=False, dtype=torch.float64)
        self.function = forward

    def forward(self, x):
        return self.function(self, x)


FORMS = {
    "compression": lambda s, x: (x.permute(0, 2, 1) @ s.weight).permute(0, 2, 1),
    "transposes": lambda s, x: s.linear(x.transpose(1, 2)).transpose(-1, -2) * 2,
    "machine": lambda s, x: torch.bmm(x, x.permute(0, 2, 1) @ s.weight),
    "two_readers": lambda s, x: (lambda y: y.permute(0, 2, 1).reshape(-1).sum() + y.square().sum())(
        x.mT @ s.weight
    ),
}
LEFT = {
    "as_it_lies": lambda s, x: x.reshape(-1, 6) @ s.weight,
    "other_dims": lambda s, x: x.reshape(5, 6, 5).permute(2, 0, 1) @ s.weight,
}


def rewritten(model, x, dynamic=False):
    kept = []

    def backend(gm, example_inputs):
        mine = g.own_copy(gm)
        context = PassContext(Options())
        for one in (Canonicalize(), Dispatch({}), BatchedLinear(devices=("cpu",))):
            record = run_pass(one, mine, context)
        kept.append((mine, record))
        return mine

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    return compiled, kept


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_values_and_gradients(name: str, dynamic: bool) -> None:
    model = Mix(FORMS[name])
    x = torch.randn(5, 6, 5, dtype=torch.float64, requires_grad=True)
    compiled, kept = rewritten(model, x, dynamic)
    y = compiled(x)
    (gm, record), *_ = kept
    assert any(n.target is torch.bmm for n in gm.graph.nodes)
    assert len(record.rewrites) == 1
    want = model(x)
    torch.testing.assert_close(y, want)
    weights = [p for p in model.parameters() if p.requires_grad]
    mine = torch.autograd.grad(y.sum(), [x, *weights], allow_unused=True)
    theirs = torch.autograd.grad(want.sum(), [x, *weights], allow_unused=True)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", LEFT)
def test_other_linears_stay(name: str) -> None:
    model = Mix(LEFT[name])
    x = torch.randn(5, 6, 5, dtype=torch.float64)
    compiled, kept = rewritten(model, x)
    torch.testing.assert_close(compiled(x), model(x))
    assert not kept[0][1].rewrites


def test_an_observed_site_is_left_and_another_is_not() -> None:
    kept = []

    def backend(gm, example_inputs):
        mine = g.own_copy(gm)
        context = PassContext(Options())
        for one in (Canonicalize(), Dispatch({})):
            run_pass(one, mine, context)
        linears = [n for n in mine.graph.nodes if g.is_call(n, torch.ops.loka.linear.default)]
        for name, node in zip(("seen", "unseen"), linears, strict=True):
            node.meta[g.SITE] = name
        run_pass(Observe(frozenset({"seen"})), mine, context)
        kept.append(run_pass(BatchedLinear(devices=("cpu",)), mine, context))
        kept.append([n.meta[g.SITE] for n in mine.graph.nodes if n in linears])
        return gm

    def two(s, x):
        return s.linear(x.mT).mT.sum() + (x.mT @ s.weight).mT.sum()

    torch._dynamo.reset()
    torch.compile(Mix(two), backend=backend)(torch.randn(5, 6, 5, dtype=torch.float64))
    record, left = kept
    assert len(record.rewrites) == 1 and left == ["seen"]
