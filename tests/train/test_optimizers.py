"""Row-wise Adagrad against its definition; which parameter gets which optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from loka_compile.train.optimizers import RowwiseAdagrad
from loka_compile.train.optimizers import TrainError
from loka_compile.train.optimizers import make_optimizers


@pytest.mark.parametrize("sparse", [True, False])
def test_three_steps_by_hand(sparse: bool) -> None:
    torch.manual_seed(0)
    table = nn.EmbeddingBag(6, 4, mode="sum", sparse=sparse)
    weight, total = table.weight.detach().double().clone(), torch.zeros(6, dtype=torch.float64)
    optimizer = RowwiseAdagrad(table.parameters(), lr=0.1)
    for ids in ([0, 2, 2], [2, 5, 0], [1, 1, 1]):
        scale = torch.randn(3, 4)
        optimizer.zero_grad()
        (table(torch.tensor(ids).reshape(-1, 1)) * scale).sum().backward()
        optimizer.step()
        gradient = torch.zeros(6, 4, dtype=torch.float64)
        gradient.index_add_(0, torch.tensor(ids), scale.double())
        total += gradient.square().mean(1)
        weight -= 0.1 * gradient / (total.sqrt() + 1e-8).unsqueeze(1)
    torch.testing.assert_close(table.weight.detach().double(), weight, rtol=1e-5, atol=1e-6)
    # One number per row, and row 3 and 4 were never met.
    state = optimizer.state[table.weight]["sum"]
    assert state.shape == (6,)
    assert state[3] == state[4] == 0.0


def test_state_survives_a_round_trip() -> None:
    def step(table: nn.EmbeddingBag, optimizer: RowwiseAdagrad) -> None:
        optimizer.zero_grad()
        table(torch.tensor([[1], [2]])).square().sum().backward()
        optimizer.step()

    torch.manual_seed(0)
    a = nn.EmbeddingBag(4, 2, mode="sum", sparse=True)
    first = RowwiseAdagrad(a.parameters())
    step(a, first)
    b = nn.EmbeddingBag(4, 2, mode="sum", sparse=True)
    b.load_state_dict(a.state_dict())
    second = RowwiseAdagrad(b.parameters())
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # as a file would hold it
    step(a, first)
    step(b, second)
    assert torch.equal(a.weight, b.weight)


def test_tables_with_sparse_gradients_are_apart() -> None:
    model = nn.ModuleDict(
        {"sparse": nn.EmbeddingBag(3, 2, sparse=True), "dense": nn.Embedding(3, 2)}
    )
    adam, rowwise = make_optimizers(model, "adam", 1e-3, 0.5)
    assert isinstance(adam, torch.optim.Adam) and isinstance(rowwise, RowwiseAdagrad)
    assert adam.param_groups[0]["params"] == [model["dense"].weight]
    assert rowwise.param_groups[0]["lr"] == 0.5
    with pytest.raises(TrainError, match="adam or adagrad"):
        make_optimizers(model, "sgdd", 1e-3, 0.5)


def test_what_it_cannot_take() -> None:
    with pytest.raises(ValueError, match="lr is 0"):
        RowwiseAdagrad([nn.Parameter(torch.ones(2, 2))], lr=0.0)
    vector = nn.Parameter(torch.ones(2))
    vector.grad = torch.ones(2)
    with pytest.raises(ValueError, match="rows, dim"):
        RowwiseAdagrad([vector]).step()
