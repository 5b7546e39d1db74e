"""FSDP2 (`fully_shard`): which parameter of the model a gathered one stands for.

A sharded model holds DTensors; for a forward and its backward, FSDP2 puts gathered parameters in
their place, the same objects at every step, and those are what a compiled graph is given.

Torch 2.11 to 2.14 keep the relation in private state only: `_fsdp_param_group` of a module's state,
`_fsdp_param_groups` since 2.13. Remove when a gathered parameter can be asked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Gathered:
    """A parameter that FSDP2 gathers. `parameter` is None before the first time."""

    parameter: torch.Tensor | None
    sharded: torch.Tensor
    module: torch.nn.Module
    #: In its module; `path` from the outermost sharded module, None before the first forward.
    name: str
    path: str | None
    shape: tuple[int, ...]


def gathered_of(model: torch.nn.Module | None = None) -> Iterator[Gathered]:
    """Of `model` (None: of the process)."""
    if "torch.distributed.fsdp._fully_shard._fsdp_state" not in sys.modules:
        return
    from torch.distributed import _composable_state as states

    known = states._module_state_mapping
    within = None if model is None else set(map(id, model.modules()))
    for module, ref in list(known.items()):
        if within is None or id(module) in within:
            yield from _of_state(ref())


def _of_state(state: Any) -> Iterator[Gathered]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        for one in getattr(group, "fsdp_params", ()):
            where = one._module_info
            yield Gathered(
                getattr(one, "_unsharded_param", None),
                one.sharded_param,
                where.module,
                where.param_name,
                getattr(one, "_param_fqn", None),
                tuple(one._orig_size),
            )


def gathered(parameter: torch.Tensor) -> Gathered | None:
    """What is known of `parameter` where FSDP2 gathered it."""
    return next((one for one in gathered_of() if one.parameter is parameter), None)
