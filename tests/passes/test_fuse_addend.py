"""Variants 10 and 11: a residual or a second linear before the norm is part of the fused op."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from chain_models import K
from chain_models import N
from chain_models import norm_ref
from chain_models import perturb
from torch import nn

from loka_compile.passes.fuse import FUSED


class Sum(nn.Module):
    """norm(linear(x) + what), in the orders and shapes that people write; then an activation."""

    def __init__(self, how: str, act=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.linear = nn.Linear(K, N)
        self.other = nn.Linear(K, N, bias=False)
        self.norm = nn.LayerNorm(N if how in ("residual", "left", "two linears") else N // 2)
        self.act = act or nn.Identity()
        perturb(self)

    def summed(self, x, w_bias):
        z = F.linear(x, self.linear.weight, self.linear.bias if w_bias else None)
        r = torch.tanh(F.linear(x, self.other.weight))
        return {
            "residual": lambda: z + r,
            "left": lambda: r + z,
            "two linears": lambda: z + F.linear(x, self.other.weight),
            "view, sum": lambda: z.view(*x.shape[:-1], 2, -1) + r.view(*x.shape[:-1], 2, -1),
            "sum, view": lambda: (z + r).view(*x.shape[:-1], 2, -1),
        }[self.how]()

    def forward(self, x):
        return self.act(self.norm(self.summed(x, True)))


def reference(model, x):
    v = norm_ref(model.summed(x, False), model.norm)
    return F.hardswish(v) if isinstance(model.act, nn.SiLU) else v


HOW = ("residual", "left", "two linears", "view, sum", "sum, view")


@pytest.mark.parametrize("how", HOW)
def test_one_op(how, quick, capture, agree):
    model = Sum(how, nn.SiLU() if how != "left" else None).train(quick.train)
    captured = capture(model, "mods")
    agree(captured, model, reference, quick, K)
    assert captured.count(FUSED) == 1
    (node,) = captured.nodes(FUSED)
    assert node.args[20] is not None
    assert "linear + addend + block_norm" in str(captured.notes("rewrites", "fuse"))


def test_dynamic_batches_add_no_guard(capture, close):
    model = Sum("view, sum", nn.SiLU()).train()
    captured = capture(model, "mods")
    for m in (4, 7):
        x = torch.randn(m, K)
        torch._dynamo.mark_dynamic(x, 0)
        close(captured(x), reference(model, x))
    assert captured.count(FUSED) == 1 and len(captured.after) == 1


def test_without_mods_an_rms_norm_takes_it_too(capture, close):
    model = Sum("residual")
    model.linear = nn.Linear(K, N, bias=False)
    model.norm = nn.RMSNorm(N, eps=1e-5)
    captured = capture(model, "exact")
    x = torch.randn(4, K)
    close(captured(x), model(x))
    assert captured.count(FUSED) == 1
