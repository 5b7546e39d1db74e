"""Biases of linears and layer norms go, except in heads; parameters stay in the signature."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from loka_compile.passes.strip_bias import STRIP_BIAS

LINEAR = torch._C._nn.linear


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.bn = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 1)
        for p in self.parameters():
            nn.init.normal_(p)

    def forward(self, x):
        return self.head(self.bn(self.norm(self.body(x))))


def test_all_but_the_head(capture, close):
    model = Model().eval()
    captured = capture(model, [STRIP_BIAS], heads=["head"])
    x = torch.randn(3, 4)
    got = captured(x)
    h = F.layer_norm(F.linear(x, model.body.weight), (6,), model.norm.weight)
    close(got, model.head(model.bn(h)))
    assert captured.notes("changes") == ["bias removed", "bias removed"]
    body, head = captured.nodes(LINEAR)
    assert body.args[2] is None
    assert head.args[2] is not None
    assert captured.nodes(F.batch_norm)[0].args[4] is not None


def test_the_signature_and_the_model_are_untouched(capture):
    model = Model()
    keys = list(model.state_dict())
    captured = capture(model, [STRIP_BIAS], heads=["head"])
    captured(torch.randn(3, 4)).sum().backward()
    placeholders = [
        [n.target for n in gm.graph.nodes if n.op == "placeholder"]
        for gm in (captured.before[0], captured.after[0])
    ]
    assert placeholders[0] == placeholders[1]
    assert list(model.state_dict()) == keys
    assert model.body.bias.grad is None
    assert model.head.bias.grad is not None


def test_a_bias_added_by_hand_goes_too(capture, close):
    w, b = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))
    captured = capture(lambda x: x @ w + b, [STRIP_BIAS])
    x = torch.randn(3, 4)
    close(captured(x), x @ w)


def test_a_computed_bias_stays(capture, close):
    w = nn.Parameter(torch.randn(6, 4))
    captured = capture(lambda x, b: F.linear(x, w, b * 2), [STRIP_BIAS])
    x, b = torch.randn(3, 4), torch.randn(6)
    close(captured(x, b), F.linear(x, w, b * 2))
    assert "computed" in captured.refusals("strip_bias")
