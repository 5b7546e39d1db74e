"""A selective checkpoint around compiled blocks: its modes see every op of both forwards."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import loka_compile
from loka_compile import loka_backend
from loka_compile.inner_eager import call_directly

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
OPTIONS = {
    "inner": "aot_eager",
    "mods": "off",
    "emulate": True,
    "recipes": ("rowwise",),
    "libraries": ("torch",),
    "probe_every": 2,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(F.silu(self.a(x)))


def policy(saved: str, context, op, *args, **kwargs) -> CheckpointPolicy:
    if saved == "everything" or (saved == "products" and op in PRODUCTS):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("saved", ["products", "everything"])
def test_probed_planned_and_probed_again(saved: str) -> None:
    torch._dynamo.reset()
    blocks = nn.ModuleList([Block(), Block()])
    eager = copy.deepcopy(blocks)
    first, second = (torch.compile(b, backend=loka_backend, options=OPTIONS) for b in blocks)
    contexts = partial(create_selective_checkpoint_contexts, partial(policy, saved))
    for step in range(14):
        x = torch.randn(64, 16, requires_grad=True)
        blocks.zero_grad()
        eager.zero_grad()
        h = checkpoint(lambda x: second(first(x)), x, use_reentrant=False, context_fn=contexts)
        h.square().mean().backward()
        eager[1](eager[0](x)).square().mean().backward()
        # Exact while it is probed; the plan comes at the ninth.
        allowed = 1e-6 if step < 8 else 0.15
        for got, want in zip(blocks.parameters(), eager.parameters(), strict=True):
            assert (got.grad - want.grad).norm() <= allowed * want.grad.norm(), step
    plan = loka_compile.plan_of(blocks)
    assert plan.active and any(c.is_fp8 for s in plan.sites.values() for c in s.directions.values())


def test_other_ops_stay_as_they_are() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(
        torch.ops.higher_order.auto_functionalized_v2,
        (torch.ops.aten.add_.Tensor,),
        {"other": 1.0, "_self_base_index": 0, "_all_bases": [x]},
    )
    graph.output(graph.call_function(torch.ops.aten.neg.default, (call,)))
    before = str(graph)
    call_directly(graph)
    assert str(graph) == before
