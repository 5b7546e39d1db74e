"""Row-wise Adagrad for embedding tables, and the optimizers of a model by kind of parameter."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from typing import Any
from typing import cast

import torch
from torch import nn

from loka_compile.errors import LokaError
from loka_compile.zoo.embeddings import EmbeddingCollection

OPTIMIZERS = ("adam", "adagrad")


class TrainError(LokaError):
    """A training run that cannot be set up as asked."""


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator per row of a table: the mean of the squared gradient.

    Parameters ``[rows, dim]``, gradients sparse (only rows that were looked up are touched) or
    dense. ``w -= lr * g / (sqrt(sum over steps of mean(g^2)) + eps)``, as TorchRec's tables have it
    (EXACT_ROWWISE_ADAGRAD); a dim-th of Adagrad's memory.
    """

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float = 0.05, eps: float = 1e-8
    ) -> None:
        if lr <= 0.0:
            raise ValueError(f"lr is {lr}; it must be positive")
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dim() != 2:
                    raise ValueError(f"a table is [rows, dim]; got shape {tuple(p.shape)}")
                state = self.state[p]
                if not state:
                    state["sum"] = torch.zeros(p.shape[0], dtype=torch.float32, device=p.device)
                _update(p, p.grad, state["sum"], group["lr"], group["eps"])
        return loss


def _update(
    p: torch.Tensor, grad: torch.Tensor, total: torch.Tensor, lr: float, eps: float
) -> None:
    if not grad.is_sparse:
        total += grad.float().square().mean(1)
        p -= lr * grad / (total.sqrt() + eps).unsqueeze(1).to(p.dtype)
        return
    grad = grad.coalesce()
    rows, values = grad.indices()[0], grad.values()
    # Rows are unique after coalescing, so each entry below is written once.
    now = total.index_select(0, rows) + values.float().square().mean(1)
    total.index_copy_(0, rows, now)
    p.index_add_(0, rows, values / (now.sqrt() + eps).unsqueeze(1).to(p.dtype), alpha=-lr)


def make_optimizers(
    model: nn.Module, optimizer: str, lr: float, table_lr: float
) -> list[torch.optim.Optimizer]:
    """``optimizer`` for the dense parameters, row-wise Adagrad for the tables.

    Tables are those of an ``EmbeddingCollection``, and others that have sparse gradients.
    """
    if optimizer not in OPTIMIZERS:
        raise TrainError(f"unknown optimizer {optimizer!r}; use {' or '.join(OPTIMIZERS)}")
    tables: dict[int, nn.Parameter] = {}
    for m in model.modules():
        if isinstance(m, EmbeddingCollection):
            tables |= {id(p): p for p in m.parameters()}
        elif isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse:
            tables[id(m.weight)] = cast(nn.Parameter, m.weight)
    rest = [p for p in model.parameters() if id(p) not in tables]
    made: list[torch.optim.Optimizer] = []
    if rest and optimizer == "adam":
        # One kernel for all parameters where the device has it: small steps are host-bound.
        made.append(torch.optim.Adam(rest, lr=lr, fused=all(p.is_cuda for p in rest)))
    elif rest:
        made.append(torch.optim.Adagrad(rest, lr=lr))
    if tables:
        made.append(RowwiseAdagrad(tables.values(), lr=table_lr))
    return made
