"""Graph helpers: private copies, bodies, parameters through views, mutation, canonical text."""

from __future__ import annotations

import torch
from torch import fx
from torch import nn
from torch.utils.checkpoint import checkpoint

from loka_compile.passes import graph as g
from loka_compile.passes.graph_text import text_of


def capture(f, *inputs) -> fx.GraphModule:
    kept = []

    def backend(gm, example_inputs):
        kept.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(f, backend=backend)(*inputs)
    return kept[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.p = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(self.fc, x, use_reentrant=False)
        return h @ self.p.t()


def test_own_copy_is_private_down_to_the_bodies() -> None:
    gm = capture(Net(), torch.randn(3, 8))
    before = text_of(gm)
    mine = g.own_copy(gm)
    assert text_of(mine) == before
    for one in g.every_graph(mine):
        for node in list(one.graph.nodes):
            if g.is_call(node, torch._C._nn.linear):
                node.args = (*node.args[:2], None)
    assert text_of(mine) != before and text_of(gm) == before
    sources = [n._dynamo_source for n in mine.graph.nodes if n.op == "placeholder"]
    assert all(s is not None for s in sources)
    assert len(list(g.every_graph(mine))) == 2


def test_parameter_through_transposes_and_casts() -> None:
    def f(x, w):
        return x @ w.t().to(torch.float64).transpose(0, 1).contiguous(), x @ (w * 2).double()

    gm = capture(f, torch.randn(3, 8, dtype=torch.float64), torch.randn(8, 8))
    products = [n for n in gm.graph.nodes if g.is_call(n, torch.matmul, "matmul")] or [
        n for n in gm.graph.nodes if "matmul" in str(n.target)
    ]
    found = [g.parameter_of(n.args[1]) for n in products]
    assert found[0] is not None and found[0].op == "placeholder"
    assert found[1] is None


def test_mutation() -> None:
    def f(x):
        y = x + 1
        y += 2
        y.mul_(3)
        y[0] = 0
        torch.relu_(y)
        return torch.nn.functional.relu(y, inplace=True) + y.sum()

    gm = capture(f, torch.randn(4))
    kinds = [str(n.target) for n in gm.graph.nodes if g.is_mutation(n)]
    assert len(kinds) == 5, kinds


def test_equal_graphs_give_equal_text_without_ids() -> None:
    a = text_of(capture(Net(), torch.randn(3, 8)))
    b = text_of(capture(Net(), torch.randn(3, 8)))
    assert a == b
    assert "0x" not in a and "/" not in a
    assert "float32[3, 8]" in a
