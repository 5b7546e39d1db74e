"""This process as one rank of two, beside another that is called step by step."""

from __future__ import annotations

import torch.distributed as dist

from loka_compile import agreement
from loka_compile.plan import Choice
from loka_compile.ranks import World

FP8 = Choice("torch:rowwise", "torch", "rowwise", mere_clamped=0.1, source="emulated")
DIRECTIONS = ("fwd", "dgrad", "wgrad")


def beside_another(monkeypatch) -> World:
    """This process as rank 0 of two; the world of the other."""
    store = dist.HashStore()
    here, other = World(store, 0, 2), World(store, 1, 2)
    monkeypatch.setattr(agreement, "world", lambda: here)
    other.keeps = store  # Worlds do not.
    return other
