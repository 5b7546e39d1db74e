"""What passes do to a large graph grows with its distinct layers, not with all of them."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch import nn

from loka_compile import variant
from loka_compile.capture import capture
from loka_compile.lowering import ops
from loka_compile.mod_set import ON
from loka_compile.options import Options
from loka_compile.passes import graph as g
from loka_compile.passes.handover import FUSED

FP8 = ("loka:tensorwise", "torch:tensorwise", "torch:tensorwise")


def rewritten(count: int) -> variant.Rewritten:
    """`count` equal chains, each handing e4m3 to the next."""
    made: list[variant.Rewritten] = []
    options = Options(mods="on")

    def backend(gm, inputs):
        source = capture(gm, inputs, options)
        kernels = tuple((s.name, FP8) for s in source.sites)
        made.append(variant.rewrite(source, variant.Decided(ON, kernels), options))
        return gm.forward

    with torch.device("meta"):
        parts = [m for _ in range(count) for m in (nn.Linear(32, 32), nn.LayerNorm(32), nn.SiLU())]
        model, x = nn.Sequential(*parts), torch.randn(8, 32)
    torch._dynamo.reset()
    torch.compile(model, backend=backend, dynamic=False)(x)
    return made[0]


def test_fakes_of_the_fused_op_are_computed_once_per_form(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]
    fake = ops.DIRECT[FUSED]

    def counted(*args):
        calls[0] += 1
        return fake(*args)

    monkeypatch.setitem(ops.DIRECT, FUSED, counted)
    rewritten(4)
    few, calls[0] = calls[0], 0
    rewritten(12)
    assert few > 0
    assert calls[0] == few


def test_a_value_taken_from_an_equal_layer_is_what_the_op_gives() -> None:
    nodes = [n for n in rewritten(5).gm.graph.nodes if g.is_call(n, FUSED)]
    handed = [n for n in nodes if n.args[12] == "y8t"]
    assert len(nodes) == 5
    assert len(handed) == 4
    memory = set()
    for node in nodes:
        want = ops.DIRECT[FUSED](*fx.map_arg(node.args, g.value))
        for mine, theirs in zip(g.value(node), want, strict=True):
            assert (mine.shape, mine.stride(), mine.dtype) == (
                theirs.shape,
                theirs.stride(),
                theirs.dtype,
            )
            assert mine.requires_grad == theirs.requires_grad
            memory.add(mine.untyped_storage()._cdata)
    assert len(memory) == 6 * len(nodes)


def test_no_code_is_made_for_graphs_that_nobody_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[fx.Graph] = []
    python_code = fx.Graph.python_code

    def kept(self, *args, **kwargs):
        made.append(self)
        return python_code(self, *args, **kwargs)

    monkeypatch.setattr(fx.Graph, "python_code", kept)
    gm = rewritten(2).gm
    ours = [graph for graph in made if any(g.is_call(n, FUSED) for n in graph.nodes)]
    assert ours == []
    # Dynamo's own graph, once; neither of its two copies.
    assert len({id(graph) for graph in made}) <= 1
    assert "linear_block_norm_act" in gm.code
