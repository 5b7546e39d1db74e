"""Inductor: its decompositions, its hook for graph passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from loka_compile._compat.versions import TORCH


def install_decompositions(table: dict[Any, Callable[..., Any]]) -> None:
    """Put `table` into both of Inductor's decomposition tables, in place.

    Torch 2.11 to 2.14: `fast_random_decomps()` is a frozen copy made at Inductor's first compile.
    Updating only the base dict would leave our ops opaque, with no message, in any process that ran
    a plain torch.compile before. Remove when Inductor has a public hook for decompositions.
    """
    from torch._inductor import decomposition

    decomposition.decompositions.update(table)
    decomposition.fast_random_decomps().update(table)


def missing_decompositions(table: dict[Any, Callable[..., Any]]) -> list[str]:
    """The ops of `table` that Inductor would not lower as asked; empty when all is in force."""
    from torch._inductor import decomposition

    active = decomposition.select_decomp_table()
    return [str(op) for op, formula in table.items() if active.get(op) is not formula]


def join_graph_passes(ours: Any, theirs: Any) -> Any:
    """Keep the user's own `joint_custom_pre_pass`: a list since 2.13, one composed pass before."""
    if theirs is None:
        return ours
    if TORCH >= (2, 13):
        return [ours, *(theirs if isinstance(theirs, (list, tuple)) else [theirs])]

    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Both(CustomGraphPass):
        of_loka = True

        def __call__(self, graph: torch.fx.Graph) -> None:
            ours(graph)
            theirs(graph)

        def uuid(self) -> Any:
            uuid = getattr(theirs, "uuid", None)
            return (ours.uuid(), uuid() if uuid is not None else None)

    return Both()
