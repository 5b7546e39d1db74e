"""Dispatch: every linear becomes one loka:: op with three kernel names and explicit casts."""

from __future__ import annotations

import torch
from torch import fx
from torch import nn

from loka_compile.options import Options
from loka_compile.passes import graph as g
from loka_compile.passes.dispatch import LOKA_LINEAR
from loka_compile.passes.dispatch import Dispatch
from loka_compile.passes.manager import PassContext
from loka_compile.passes.manager import run_pass

KERNELS = ("torch:rowwise+emulated", "high_precision", "torch:tensorwise+emulated")


def dispatched(model, kernels, *inputs, autocast: bool = False) -> tuple[fx.GraphModule, object]:
    """(graph after dispatch, what the compiled model returned), sites named by their order."""
    kept = []

    def backend(gm, example_inputs):
        mine = g.own_copy(gm)
        for one in g.every_graph(mine):
            for node in one.graph.nodes:
                if g.is_call(node, torch._C._nn.linear):
                    node.meta[g.SITE] = f"site{len(kept)}"
        run_pass(Dispatch(kernels), mine, PassContext(Options()))
        kept.append(mine)
        return mine

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = compiled(*inputs)
    return kept[0], out


def test_kernel_names_and_values() -> None:
    model = nn.Linear(32, 48)
    x = torch.randn(5, 32)
    gm, y = dispatched(model, {"site0": KERNELS}, x)
    (node,) = [n for n in gm.graph.nodes if n.target is LOKA_LINEAR]
    assert node.args[3:] == (*KERNELS, [], *((None,) * 7))
    assert not any(g.is_call(n, torch._C._nn.linear) for n in gm.graph.nodes)
    reference = model(x)
    assert 1e-3 < (y - reference).norm() / reference.norm() < 0.1


def test_a_site_without_a_decision_stays_high() -> None:
    model = nn.Linear(32, 48)
    x = torch.randn(5, 32)
    gm, y = dispatched(model, {}, x)
    (node,) = [n for n in gm.graph.nodes if n.target is LOKA_LINEAR]
    assert node.args[3:6] == ("high_precision",) * 3
    torch.testing.assert_close(y, model(x))


def test_autocast_becomes_explicit_casts() -> None:
    model = nn.Linear(32, 48)
    x = torch.randn(5, 32)
    gm, y = dispatched(model, {}, x, autocast=True)
    (node,) = [n for n in gm.graph.nodes if n.target is LOKA_LINEAR]
    assert [g.value(a).dtype for a in node.args[:3]] == [torch.bfloat16] * 3
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(y, model(x))
    y.float().sum().backward()
    assert model.weight.grad.dtype == torch.float32


def test_functorch_graphs_are_left_alone() -> None:
    weight = torch.randn(48, 32)

    def f(x):
        return torch.vmap(lambda row: torch.nn.functional.linear(row, weight))(x)

    x = torch.randn(5, 32)
    gm, y = dispatched(f, {}, x)
    assert not any(n.target is LOKA_LINEAR for n in gm.graph.nodes)
    torch.testing.assert_close(y, f(x))
