"""RMSNorm written by hand is recognised in its spellings, and left where that is not the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

N = 12
RMS = torch.rms_norm


class Written(nn.Module):
    def __init__(self, fn) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(N))
        self.fn = fn

    def forward(self, x):
        return self.fn(x, self.w)


def _llama(x, w):
    kind = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return w.to(kind) * x.to(kind)


SPELLINGS = {
    "pow": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "torch-pow": lambda x, w: x * torch.rsqrt(torch.mean(torch.pow(x, 2), -1, True) + 1e-5),
    "operator-pow": lambda x, w: (x**2).mean(dim=-1, keepdim=True).add(1e-5).rsqrt() * x,
    "square": lambda x, w: x * (1e-5 + x.square().mean([-1], keepdim=True)).rsqrt(),
    "product": lambda x, w: x * torch.rsqrt((x * x).mean(x.dim() - 1, keepdim=True) + 1e-5),
    "divide": lambda x, w: x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "one-over": lambda x, w: x * (1.0 / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
    "reciprocal": lambda x, w: x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt().reciprocal(),
    "weight-after": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w,
    "weight-before": lambda x, w: (w * x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "cast": lambda x, w: (
        x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    ).type_as(x),
    "cast-statistics": lambda x, w: (
        x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5).to(x.dtype)
    ),
    "llama": _llama,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPELLINGS)
def test_written_by_hand(name, dtype, capture, close):
    model = Written(SPELLINGS[name]).to(dtype)
    captured = capture(model)
    x = torch.randn(2, 5, N, dtype=dtype, requires_grad=True)
    got, want = captured(x), model(x)
    close(got, want, dtype)
    direction = torch.randn_like(want)
    weighted = name in ("weight-after", "weight-before", "llama")
    inputs = [x, model.w] if weighted else [x]
    for mine, theirs in zip(
        torch.autograd.grad(got, inputs, direction),
        torch.autograd.grad(want, inputs, direction),
        strict=True,
    ):
        close(mine, theirs, dtype)
    (node,) = captured.nodes(RMS)
    assert node.args[1] == (N,)
    assert node.args[3] == 1e-5
    assert (node.args[2] is not None) == weighted
    assert captured.count("pow", "rsqrt", torch.rsqrt, torch.sqrt, "mean") == 0


REFUSED = {
    "eps-outside": (
        lambda x, w: x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + 1e-5),
        "outside the root",
    ),
    "cubes": (lambda x, w: x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-5), None),
    "first-dim": (lambda x, w: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-5), None),
    "other-tensor": (
        lambda x, w: x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-5),
        None,
    ),
    "reader": (
        lambda x, w: (r := torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)) * x + r,
        "other readers",
    ),
    "rounding-cast": (
        lambda x, w: x * torch.rsqrt(x.bfloat16().pow(2).mean(-1, keepdim=True).float() + 1e-5),
        None,
    ),
    "rounding-top": (
        lambda x, w: x.bfloat16() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
        "rounds the input",
    ),
    "half": (
        lambda x, w: (h := x.half()) * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-3),
        "float16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_written_forms_that_are_left(name, capture, close):
    fn, why = REFUSED[name]
    model = Written(fn)
    captured = capture(model)
    x = torch.randn(5, N)
    assert torch.equal(captured(x), model(x))
    assert captured.count(RMS) == 0
    assert why is None or why in captured.refusals()


def test_no_match_across_a_write(capture, close):
    def forward(x):
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x.add_(1)
        return x * r

    captured = capture(forward)
    mine = torch.randn(3, N)
    theirs = mine.clone()
    close(captured(mine), forward(theirs))
    close(mine, theirs)
    assert captured.count(RMS) == 0
