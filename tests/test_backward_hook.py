"""What waits for a backward must not disturb compiled autograd, which traces hooks, too."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import loka_compile
from loka_compile import loka_backend
from loka_compile.backward_hook import _HOOKS
from loka_compile.backward_hook import on_backward

FP8 = {"inner": "aot_eager", "mods": "off", "emulate": True, "force": {"*": "torch:rowwise"}}


def train(traced: bool, options: dict) -> tuple[loka_compile.Plan, int, dict]:
    """Ten steps; the plan, how often a backward was compiled, the last gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))
    compiled = torch.compile(model, backend=loka_backend, options=options)
    count = CompileCounterWithBackend("aot_eager")
    backward = torch.compile(backend=count, fullgraph=True)
    for _ in range(10):
        model.zero_grad()
        logits = compiled(torch.randn(32, 32))
        loss = F.binary_cross_entropy_with_logits(logits, (logits > 0).float())
        if traced:
            with torch._dynamo.compiled_autograd._enable(backward):
                loss.backward()
        else:
            loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return loka_compile.plan_of(model), count.frame_count, gradients


@pytest.mark.parametrize("gate", ["robust", "budget"])
def test_compiled_autograd_probes_and_changes_to_the_plan(gate: str) -> None:
    own = {} if gate == "robust" else {"gate": gate, "loss_budget": 1.0, "force": {}}
    options = {**FP8, **own}
    plan, compiles, gradients = train(True, options)
    want, _, wanted = train(False, options)
    assert plan.active and plan.sites == want.sites
    # One before the plan, one with it: tokens and hooks are no part of the traced code.
    assert compiles <= 2
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name])


def test_a_hook_lives_as_long_as_its_graph() -> None:
    before, seen = len(_HOOKS), []
    y = torch.ones(3, requires_grad=True) * 2
    on_backward((y, None), lambda: seen.append(1))
    assert len(_HOOKS) == before + 1
    y.sum().backward()
    del y
    assert seen == [1] and len(_HOOKS) == before


def test_no_cuda_graph_takes_a_hook_in() -> None:
    assert torch.Tag.cudagraph_unsafe in torch.ops.loka.on_backward.default.tags
