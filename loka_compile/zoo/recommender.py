"""What all models of the zoo share: tables that stay eager, a dense part that the user compiles."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from typing import ClassVar
from typing import TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from loka_compile.zoo.embeddings import EmbeddingCollection

C = TypeVar("C")


@dataclass(frozen=True)
class History:
    """A row's history: ``length`` ids of the categorical field at index ``field``."""

    field: int
    length: int


def pick(scales: Mapping[str, C], scale: str) -> C:
    """The configuration of ``scale``; ValueError with the known names otherwise."""
    if scale not in scales:
        raise ValueError(f"unknown scale {scale!r}; use one of {', '.join(scales)}")
    return scales[scale]


class Recommender(nn.Module):
    """``embedding`` (eager) and ``dense`` (compiled by the user).

    A subclass names its configurations and the class of its dense part, which is made by
    ``dense_type(cfg, n_embeddings, n_dense)`` and called with the tensors that ``inputs`` gives.

    cfg: one of ``scales``. sparse: sparse gradients of the tables, for row-wise Adagrad.
    shared_table: one table for all fields (one lookup instead of n). history: what the sequence
    of a row is, for models with ``uses_history``.
    """

    scales: ClassVar[Mapping[str, Any]]
    dense_type: ClassVar[type[nn.Module]]
    #: Whether the dense part also takes the embedded history and its mask.
    uses_history: ClassVar[bool] = False
    #: One line for help and reports.
    about: ClassVar[str]

    embedding: EmbeddingCollection
    dense: nn.Module

    def __init__(
        self,
        cfg: Any,
        cardinalities: Sequence[int],
        n_dense: int,
        *,
        sparse: bool = False,
        shared_table: bool = False,
        history: History | None = None,
    ) -> None:
        super().__init__()
        if self.uses_history and history is None:
            raise ValueError(f"{type(self).__name__} reads a history; pass history=History(..)")
        self.history = history if self.uses_history else None
        self.embedding = EmbeddingCollection(
            cardinalities, cfg.d, sparse=sparse, shared_table=shared_table
        )
        self._made_of = (cfg, len(cardinalities), n_dense)
        self.dense = self.dense_type(*self._made_of)

    def inputs(
        self, ids: torch.Tensor, dense: torch.Tensor, history: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """What ``dense`` takes. history: int64 ``[B, T]``, newest last, 0 where there is none.

        embeddings ``[B, n, d]``, dense ``[B, F]``[, history ``[B, T, d]``, mask bool ``[B, T]``].
        """
        embeddings = self.embedding(ids)
        if self.history is None:
            return embeddings, dense
        if history is None:
            raise ValueError(f"{type(self).__name__} needs the history of each row, int64 [B, T]")
        mask = history > 0
        rows = self.embedding.lookup(self.history.field, history)
        return embeddings, dense, rows * mask.unsqueeze(-1), mask

    def forward(
        self, ids: torch.Tensor, dense: torch.Tensor, history: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits ``[B]``, or ``[B, heads]`` where there are several; the first is the label's."""
        return self.dense(*self.inputs(ids, dense, history))

    def example_inputs(self, rows: int, device: Any = None) -> tuple[torch.Tensor, ...]:
        """Inputs of ``dense`` as random tensors (normal; the mask all true)."""
        cfg, n, n_dense = self._made_of
        out = [
            torch.randn(rows, n, cfg.d, device=device),
            torch.randn(rows, n_dense, device=device),
        ]
        if self.history is not None:
            length = self.history.length
            out.append(torch.randn(rows, length, cfg.d, device=device))
            out.append(torch.ones(rows, length, dtype=torch.bool, device=device))
        return tuple(out)

    def flops_per_example(self) -> int:
        """Forward FLOPs (2 per multiply-add) of all matrix products; training costs 3x this."""
        with torch.device("meta"):
            dense = self.dense_type(*self._made_of)
        with FlopCounterMode(display=False) as counter:
            dense(*self.example_inputs(2, "meta"))
        return counter.get_total_flops() // 2

    def parameter_counts(self) -> dict[str, int]:
        """Numbers of parameters: ``{"embedding": .., "dense": ..}``."""
        return {
            name: sum(p.numel() for p in part.parameters())
            for name, part in (("embedding", self.embedding), ("dense", self.dense))
        }
