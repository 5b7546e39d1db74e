"""An einsum of an activation with a matrix parameter becomes a linear, values and strides kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

LINEAR = torch._C._nn.linear
K, N = 6, 10

#: equation, shape of x, the weight's stored order
FORMS = {
    "last": ("bk,nk->bn", (4, K), "nk"),
    "stored-kn": ("bk,kn->bn", (4, K), "kn"),
    "three": ("bsk,nk->bsn", (2, 3, K), "nk"),
    "dots": ("...k,nk->...n", (2, 3, K), "nk"),
    "dots-of-nothing": ("...k,kn->...n", (K,), "kn"),
    "weight-first": ("nk,bk->bn", (4, K), "nk"),
    "fields": ("bkd,kn->bnd", (2, K, 3), "kn"),
    "fields-stored-nk": ("bkd,nk->bnd", (2, K, 3), "nk"),
    "turned": ("bsk,nk->sbn", (2, 3, K), "nk"),
    "square": ("bk,nk->bn", (4, K), "kk"),
}


def operands(name):
    equation, shape, stored = FORMS[name]
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(*({"n": N, "k": K}[i] for i in stored)))
    return equation, torch.randn(shape, requires_grad=True), weight


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_forms(name, autocast, capture, close):
    equation, x, weight = operands(name)

    def forward(x):
        pair = (weight, x) if equation.startswith("nk,") else (x, weight)
        return torch.einsum(equation, *pair)

    captured = capture(forward)
    results = []
    for run in (captured, forward):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = run(x)
        grads = torch.autograd.grad(y.float().square().sum(), (x, weight))
        results.append((y, *grads))
    for got, want in zip(*results, strict=True):
        close(got, want, torch.bfloat16 if autocast else None)
    assert results[0][0].stride() == results[1][0].stride()
    assert captured.count(LINEAR) == 1
    assert captured.count(torch.einsum) == 0


LEFT = {
    "activations": (lambda x, w, v: torch.einsum("bk,nk->bn", x, v), None),
    "implicit": (lambda x, w, v: torch.einsum("bk,nk", x, w), "no explicit result"),
    "diagonal": (lambda x, w, v: torch.einsum("bb,nk->bn", x[:4, :4], w), "repeated index"),
    "outer": (lambda x, w, v: torch.einsum("bk,nd->bnkd", x, w), "over one index"),
    "summed": (lambda x, w, v: torch.einsum("bk,nk->n", x, w), "the parameter has not"),
    "elementwise": (lambda x, w, v: torch.einsum("nk,nk->nk", w, w), "over one index"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name, capture, close):
    fn, why = LEFT[name]
    weight = nn.Parameter(torch.randn(N, K))
    captured = capture(lambda x, v: fn(x, weight, v))
    x, v = torch.randn(4, K), torch.randn(N, K)
    close(captured(x, v), fn(x, weight, v))
    assert captured.count(torch.einsum) == 1
    assert captured.count(LINEAR) == 0
    assert why is None or why in captured.refusals()


def test_operands_in_a_list_and_a_symbolic_batch(capture, close):
    weight = nn.Parameter(torch.randn(N, K))
    captured = capture(lambda x: torch.einsum("b k , n k -> b n", [x, weight]), dynamic=True)
    for batch in (3, 7):
        x = torch.randn(batch, K)
        close(captured(x), x @ weight.t())
    assert captured.count(LINEAR) == 1
    assert len(captured.after) == 1
