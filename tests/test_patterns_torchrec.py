"""The document's cross pattern in models as TorchRec writes them, and in TorchRec's own modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import loka_compile
from loka_compile import loka_backend
from loka_compile.passes.fuse import FUSED


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def cross():
    """What a newcomer copies from docs/patterns.md."""
    document = (Path(__file__).parents[1] / "docs" / "patterns.md").read_text(encoding="utf-8")
    block = next(b for b in re.findall(r"^```python\n(.*?)^```", document, flags=re.M | re.S))
    found: dict = {}
    exec(block, found)
    return found["cross"]


class SwishLayerNorm(nn.Module):
    """x * sigmoid(layer_norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(width), nn.Sigmoid())

    def forward(self, x):
        return x * self.norm(x)


class Perceptron(nn.Module):
    """A linear with its activation; the activation may be a function or a module."""

    def __init__(self, size: int, out: int, activation) -> None:
        super().__init__()
        self._linear = nn.Linear(size, out)
        self._activation_fn = activation

    def forward(self, x):
        return self._activation_fn(self._linear(x))


class LowRankCrossNet(nn.Module):
    """x0 * (W(V x) + b) + x per layer; kernels and biases are parameters without modules."""

    def __init__(self, width: int, layers: int, rank: int) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.randn(width, rank) / 4) for _ in range(layers))
        self.v = nn.ParameterList(nn.Parameter(torch.randn(rank, width) / 8) for _ in range(layers))
        self.b = nn.ParameterList(nn.Parameter(torch.randn(width) / 8) for _ in range(layers))

    def forward(self, x):
        x_0 = x
        for w, v, b in zip(self.w, self.v, self.b, strict=True):
            x = x_0 * (F.linear(F.linear(x, v), w) + b) + x
        return x


class Dense(nn.Module):
    """Dense arch, cross net, over arch."""

    def __init__(self, cross=None, mlp=None) -> None:
        super().__init__()
        self.dense = mlp or nn.Sequential(
            Perceptron(13, 64, SwishLayerNorm(64)), Perceptron(64, 32, torch.relu)
        )
        self.cross = cross or LowRankCrossNet(64, 3, 16)
        self.over = nn.Sequential(Perceptron(64, 48, nn.ReLU()), nn.Linear(48, 1))

    def forward(self, dense, sparse):
        x = torch.cat([self.dense(dense), sparse], 1)
        return torch.sigmoid(self.over(self.cross(x)))


def check(model, cross, layers):
    """Values and gradients, and one match per layer."""
    options = {"inner": "aot_eager", "mods": "off"}
    inputs = torch.randn(8, 13), torch.randn(8, 32)
    compiled = torch.compile(model, backend=loka_backend, options=options)
    with loka_compile.patterns(cross), loka_compile.explain(model) as report:
        got = compiled(*inputs)
    want = model(*inputs)
    torch.testing.assert_close(got, want)
    parameters = list(model.parameters())
    pairs = zip(
        torch.autograd.grad(got.sum(), parameters),
        torch.autograd.grad(want.sum(), parameters),
        strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    (record,) = [r for graph in report.graphs for r in graph.records if r.name == "cross"]
    assert record.matches == layers, record.refusals
    assert "addcmul" in report.diff("cross")
    assert report.eager == []
    return report


def test_the_documents_pattern_matches_in_a_model_of_torchrecs_form(cross):
    report = check(Dense(), cross, 3)
    assert any(line.startswith("cross: ") for line in report.rewrites)
    # Mods off: the gate's layer_norm stays, and its linear says so.
    assert report.why("dense.0._linear").count("Not fused: ") == 1


class FullRankCrossNet(nn.Module):
    """x0 * (W x + b) + x per layer, on columns: x is (B, width, 1), b is (width, 1)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.kernels = nn.ParameterList(
            nn.Parameter(torch.randn(width, width) / 8) for _ in range(layers)
        )
        self.bias = nn.ParameterList(nn.Parameter(torch.randn(width, 1)) for _ in range(layers))

    def forward(self, x):
        x_0 = x = x.unsqueeze(2)
        for w, b in zip(self.kernels, self.bias, strict=True):
            x = x_0 * (torch.matmul(w, x) + b) + x
        return torch.squeeze(x, dim=2)


t = torch.randn


@loka_compile.pattern(
    example=lambda: (t(8, 64, 1), t(64, 64), t(64, 1), t(8, 64, 1)), preserves=True
)
def column_cross(x, w, b, x0):
    return x0 * (torch.matmul(w, x) + b) + x


@column_cross.replace
def _(x, w, b, x0):
    y = F.linear(x.squeeze(-1), w, b.squeeze(-1))
    return torch.addcmul(x, x0, y.unsqueeze(-1))


def test_a_cross_net_on_columns_is_linears_too_and_matches_as_it_is_written():
    assert loka_compile.check_pattern(column_cross).matches == 1
    torch._dynamo.reset()
    model, x = FullRankCrossNet(64, 3), torch.randn(8, 64)
    options = {"inner": "aot_eager", "mods": "off", "patterns": [column_cross]}
    compiled = torch.compile(model, backend=loka_backend, options=options)
    with loka_compile.explain(model) as report:
        torch.testing.assert_close(compiled(x), model(x))
    assert [s["name"] for s in report.sites] == ["kernels.0", "kernels.1", "kernels.2"]
    (record,) = [r for r in report.graphs[0].records if r.name == "column_cross"]
    assert record.matches == 3 and not record.refusals


def test_swish_layer_norm_fuses_with_its_perceptron():
    options = {"inner": "eager", "mods": "on"}
    model = Dense()
    with loka_compile.explain() as report:
        torch.compile(model, backend=loka_backend, options=options)(
            torch.randn(8, 13), torch.randn(8, 32)
        )
    assert "Fused as dense.0._linear+block_norm+hard_sigmoid+gate" in report.why("dense.0._linear")
    assert FUSED._name.split("::")[1] in report.diff("fuse")


def test_with_torchrecs_own_modules(cross):
    crossnet = pytest.importorskip("torchrec.modules.crossnet", exc_type=ImportError)
    from torchrec.modules.activation import SwishLayerNorm as Own
    from torchrec.modules.mlp import MLP

    mlp = nn.Sequential(MLP(13, [64, 32], activation=torch.relu), nn.Linear(32, 32), Own(32))
    net = crossnet.LowRankCrossNet(64, 3, 16)
    for bias in net.bias:
        nn.init.normal_(bias)
    check(Dense(net, mlp), cross, 3)
