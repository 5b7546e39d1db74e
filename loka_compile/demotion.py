"""Kernels that failed while a compiled forward ran: high precision instead, for this process.

A failure is held against the kernel at its direction, K and N. Plans that name it there, pinned or
made here, are read with high precision in its place and the error as the reason, and so saved.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

import torch

from loka_compile import _compat
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.plan import SitePlan

log = logging.getLogger("loka_compile")

_FAILED: dict[tuple[str, str, int, int], str] = {}


def may_be_a_kernel(error: Exception) -> bool:
    """False for what is surely none: memory ran out, or the caller's own mistake.

    Inside a backward a checkpoint runs its forward again, and stops it by an exception.
    """
    if _compat.in_backward():
        return False
    return not isinstance(error, (torch.OutOfMemoryError, TypeError, KeyError, AttributeError))


def demote(plans: Iterable[SitePlan], direction: str, error: Exception) -> list[str]:
    """Hold `error` against the FP8 kernels of `plans`; the names of those sites."""
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    names = []
    for plan in plans:
        kernel = plan.choice(direction).kernel
        if kernel != HIGH_PRECISION:
            _FAILED[kernel, direction, plan.K, plan.N] = why
            names.append(plan.name)
    return names


def apply(plan: SitePlan) -> SitePlan:
    """`plan` with high precision where its kernel failed in this process."""
    if not _FAILED:
        return plan
    changed = {}
    for direction, choice in plan.directions.items():
        why = _FAILED.get((choice.kernel, direction, plan.K, plan.N))
        if why is not None:
            reason = f"{choice.kernel} failed at run time: {why}"
            changed[direction] = choice.kept_high(reason, "demoted")
    return replace(plan, directions={**plan.directions, **changed}) if changed else plan
