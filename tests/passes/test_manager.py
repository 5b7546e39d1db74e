"""The manager: bodies are visited, records are kept, a user's failing pass is undone."""

from __future__ import annotations

import torch
from torch import fx
from torch import nn
from torch.utils.checkpoint import checkpoint

from loka_compile.options import Options
from loka_compile.passes import graph as g
from loka_compile.passes.graph_text import text_of
from loka_compile.passes.manager import PassContext
from loka_compile.passes.manager import run_passes


class ReluToGelu:
    name = "relu_to_gelu"

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        for node in gm.graph.nodes:
            if g.is_call(node, torch.relu, "relu"):
                node.op, node.target = "call_function", torch.nn.functional.gelu
                context.changed(node, "relu -> gelu")


class Fails:
    name = "fails"

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        for node in list(gm.graph.nodes):
            if g.is_call(node, torch.nn.functional.gelu):
                node.target = torch.sigmoid
                raise RuntimeError("half done")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda t: torch.relu(self.fc(t)), torch.relu(x), use_reentrant=False)


def capture(model: nn.Module, x: torch.Tensor) -> fx.GraphModule:
    kept = []

    def backend(gm, example_inputs):
        kept.append(g.own_copy(gm))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(x)
    return kept[0]


def test_bodies_are_visited_and_counted() -> None:
    gm = capture(Net(), torch.randn(3, 8))
    gm, (record,) = run_passes([ReluToGelu()], gm, PassContext(Options()), keep_text=True)
    assert record.matches == len(record.changes) == 2
    assert record.nodes_before == record.nodes_after > 0 and record.ms > 0
    assert "torch.relu" in record.before
    assert "torch.relu" not in record.after and "gelu" in record.after


def test_a_users_failing_pass_is_undone_and_told() -> None:
    gm = capture(Net(), torch.randn(3, 8))
    passes = [ReluToGelu(), Fails()]
    gm, records = run_passes(passes, gm, PassContext(Options()), optional=["fails"])
    assert "half done" in records[1].error
    text = text_of(gm)
    assert text.count("gelu") >= 2 and "sigmoid" not in text


def test_a_built_in_failure_is_raised() -> None:
    gm = capture(Net(), torch.randn(3, 8))
    try:
        run_passes([ReluToGelu(), Fails()], gm, PassContext(Options()))
    except RuntimeError as error:
        assert "half done" in str(error)
    else:
        raise AssertionError("a failing built-in pass must not be hidden")


def test_hooks_on_saved_tensors_hear_nothing_of_passes() -> None:
    """A checkpoint around a compiled graph counts what its first forward, which compiles, saves."""

    class Computes:
        name = "computes"

        def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
            saved.append("computed")
            torch.ones(2, requires_grad=True).exp()

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append("heard")
        return t

    saved: list[str] = []
    gm = fx.symbolic_trace(nn.Linear(2, 2))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run_passes([Computes()], gm, PassContext(Options()))
        torch.ones(2, requires_grad=True).exp()
    assert saved == ["computed", "heard"]
