"""Public bug reports restated: what people met around a torch.compile backend."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import loka_compile
from loka_compile import loka_backend

OFF = {"inner": "aot_eager", "mods": "off"}
FP8 = {**OFF, "emulate": True, "recipes": ["rowwise"], "libraries": ["torch"]}
BOTH = pytest.mark.parametrize("fp8", [False, True], ids=["high", "fp8"])


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a = nn.Linear(32, 64)
        self.norm = nn.LayerNorm(64)
        self.drop = nn.Dropout(dropout)
        self.b = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.drop(F.gelu(self.norm(self.a(x)))))


def compile_(model: nn.Module, options: dict, **kwargs):
    """The compiled model, and a list that grows by one per graph that reaches the backend."""
    torch._dynamo.reset()
    graphs: list[int] = []

    def backend(gm, inputs):
        graphs.append(len(gm.graph.nodes))
        return loka_backend(gm, inputs, options=options)

    return torch.compile(model, backend=backend, **kwargs), graphs


def train(model: nn.Module, compiled, steps: int = 10, rows: int = 32) -> None:
    for _ in range(steps):
        model.zero_grad()
        compiled(torch.randn(rows, 32)).square().mean().backward()


def near(got: torch.Tensor, want: torch.Tensor, fp8: bool = True) -> None:
    assert (got - want).norm() <= (0.15 if fp8 else 1e-4) * want.norm()


class Lora(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.base = nn.Linear(32, 32)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Linear(32, 16, bias=False), nn.Linear(16, 32, bias=False)
        nn.init.zeros_(self.b.weight)
        self.drop = nn.Dropout(0.5)

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(self.drop(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.branch, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_adapter_with_dropout_and_frozen_base(reentrant: bool) -> None:
    """huggingface/peft#3020."""
    model = nn.ModuleList([Lora(reentrant), Lora(reentrant)])
    model.forward = lambda x: model[1](model[0](x))
    compiled, _ = compile_(model, FP8)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-2)
    for _ in range(11):
        optimizer.zero_grad()
        compiled(torch.randn(32, 32, requires_grad=True)).square().mean().backward()
        optimizer.step()
    assert model[0].base.weight.grad is None
    for layer in (model[0].a, model[1].b):
        assert torch.isfinite(layer.weight.grad).all() and layer.weight.grad.any()


@BOTH
def test_many_small_graphs(agrees, fp8: bool) -> None:
    """meta-pytorch/torchrec#1888: graph breaks."""

    class Broken(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            torch._dynamo.graph_break()
            h = self.norm(h)
            torch._dynamo.graph_break()
            return self.b(h)

    model = Broken()
    agrees(model, torch.randn(32, 32), fp8=fp8)
    assert set(loka_compile.plan_of(model).sites) == ({"a", "b"} if fp8 else set())


@BOTH
def test_tied_weights(agrees, fp8: bool) -> None:
    """pytorch/pytorch#85093: one gradient, the sum of all uses; one object."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(48, 32)
            self.towers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
            self.towers[1].weight = self.towers[0].weight
            self.towers[2] = self.towers[0]
            self.head = nn.Linear(32, 48, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            h = self.embedding(i)
            return self.head(sum(tower(h) for tower in self.towers))

    model = Tied()
    weight = model.head.weight
    agrees(model, torch.randint(0, 48, (32,)), fp8=fp8)
    assert model.head.weight is model.embedding.weight is weight


@pytest.mark.parametrize("options", [OFF, FP8])
def test_second_order_is_an_error(options: dict) -> None:
    """pytorch/pytorch#91469: silently wrong second-order gradients."""
    compiled, _ = compile_(Net(), options)
    x = torch.randn(8, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"double backward|create_graph"):
        (g,) = torch.autograd.grad(compiled(x).square().sum(), x, create_graph=True)
        g.square().sum().backward()


@BOTH
def test_last_batches_of_an_epoch(agrees, fp8: bool) -> None:
    """pytorch/pytorch#96469."""
    model = Net()
    compiled, graphs = compile_(model, FP8 if fp8 else OFF)
    for rows in [64] * (10 if fp8 else 1) + [64, 24, 1, 0, 64, 24]:
        x = torch.randn(rows, 32)
        got = compiled(x)
        got.square().sum().backward()
        gradient = model.a.weight.grad.clone()
        model.zero_grad()
        model(x).square().sum().backward()
        near(got, model(x), fp8)
        assert (gradient - model.a.weight.grad).norm() <= 0.3 * gradient.norm()
        model.zero_grad()
    assert len(graphs) <= 4, "static, dynamic, and torch's own for one row and none"


@BOTH
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_first_then_training(fp8: bool, mode) -> None:
    """pytorch/pytorch#100977."""
    model, x = Net(), torch.randn(32, 32)
    compiled, _ = compile_(model, FP8 if fp8 else OFF)
    with mode():
        near(compiled(x), model(x), False)
    train(model, compiled)
    assert model.a.weight.grad.any() and loka_compile.plan_of(model).active == fp8
    with mode():
        near(compiled(x), model(x), fp8)
    train(model, compiled, 1)


@BOTH
def test_new_weights_are_used(fp8: bool) -> None:
    """pytorch/pytorch#104984: stale weights after load_state_dict, assign=True and p.data = ..."""
    model, x = Net(), torch.randn(32, 32)
    compiled, _ = compile_(model, FP8 if fp8 else OFF)
    train(model, compiled)
    model.eval()
    with torch.no_grad():
        compiled(x)
        for assign in (False, True):
            other = Net().eval()
            model.load_state_dict(other.state_dict(), assign=assign)
            near(compiled(x), other(x), fp8)
        for p in model.parameters():
            p.data = p.data * 2
        near(compiled(x), model(x), fp8)


@BOTH
def test_train_and_eval_alternate(fp8: bool) -> None:
    """pytorch/pytorch#110803: a recompile at every switch."""
    model, x = Net(0.5), torch.randn(32, 32)
    compiled, graphs = compile_(model, FP8 if fp8 else OFF)
    for _ in range(8):
        model.train()
        train(model, compiled, 2)
        assert not torch.equal(compiled(x), compiled(x))
        model.eval()
        with torch.no_grad():
            assert torch.equal(compiled(x), compiled(x))
    assert len(graphs) == 2


def test_mixed_dtypes_are_not_joined(agrees) -> None:
    """pytorch/pytorch#159492: bf16 linear + FP32 tensor."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 64, bias=False).bfloat16()
            self.bias = nn.Parameter(torch.randn(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x.bfloat16()) + self.bias

    agrees(Mixed(), torch.randn(32, 64), fp8=True)


@pytest.mark.parametrize(("dynamic", "sizes"), [(None, 50), (True, 12)])
def test_fifty_batch_sizes(dynamic: bool | None, sizes: int) -> None:
    """pytorch/pytorch#172822, #118492, #128319: graphs stay bounded, probing included."""
    model = Net()
    compiled, graphs = compile_(model, {**FP8, "mods": "on"}, dynamic=dynamic)
    for size in range(sizes):
        train(model, compiled, 1, 16 + 3 * size)
    assert len(graphs) <= 2 and loka_compile.plan_of(model).active


def test_in_place_edit_through_a_dropout_that_does_nothing(agrees) -> None:
    """pytorch/pytorch#195422."""

    class Edited(Net):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = x.clone()
            y = F.dropout(x, 0.5, False)
            y += y
            return self.a(y), x

    agrees(Edited(), torch.randn(32, 32), loss=lambda y: y[0].sum() + y[1].sum())
