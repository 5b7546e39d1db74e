"""Kernels that failed while a step ran: high precision instead, for this process.

A failure is held against the kernel at its direction, K and N. Plans that name it there, pinned or
made here, are read with high precision in its place and the error as the reason, and so saved. The
other ranks hear of it (`failure_board`) and do the same: one plan stays in force on all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import replace

import torch

from loka_compile import eligibility
from loka_compile.failure_board import Board
from loka_compile.failure_board import Failure
from loka_compile.ledger import LEDGER
from loka_compile.lowering import in_place
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.options import Options
from loka_compile.plan import SitePlan

log = logging.getLogger("loka_compile")

#: Of the reason of a direction that a kernel lost so.
FAILED = "failed at run time: "

#: Of what autograd says of a caller's mistake: `retain_graph=True` (or `create_graph=True`) through
#: a compiled backward, which uses up what was saved; a backward that has run already.
_CALLERS = ("donated buffers", "Trying to backward through the graph a second time")

_FAILED: dict[tuple[str, str, int, int], str] = {}
#: What all ranks have read of it: the first word about a kernel stands.
_SHARED: set[tuple[str, str, int, int]] = set()


def count() -> int:
    """How many kernels have been given up; it only grows."""
    return len(_FAILED)


def may_be_a_kernel(error: Exception) -> bool:
    """False for what is surely none: memory ran out, or the caller's own mistake."""
    if isinstance(error, in_place.NO_KERNELS):
        return False
    return not any(words in str(error) for words in _CALLERS)


Guilty = tuple[SitePlan, str]


def guilty(
    plans: Iterable[SitePlan], directions: Sequence[str], device: torch.device, options: Options
) -> list[Guilty]:
    """(site, direction) of the FP8 kernels that fail when run alone; all of them if none does."""
    from loka_compile.lowering.first_use import run_and_compare

    suspects = [(p, d) for p in plans for d in directions if p.choice(d).is_low]
    found = []
    for plan, direction in suspects:
        kernel = eligibility.runnable(plan.choice(direction).kernel, device, options)
        shape = GemmShape(plan.M, plan.K, plan.N)
        dtype = getattr(torch, plan.dtype)
        if run_and_compare(kernel, direction, shape, dtype, str(device)) is not None:
            found.append((plan, direction))
    return found or suspects


def demote(found: Iterable[Guilty], error: Exception) -> list[str]:
    """Hold `error` against the FP8 kernels of these sites; what they are."""
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    names = []
    for plan, direction in found:
        kernel = plan.choice(direction).kernel
        if kernel != HIGH_PRECISION:
            _hold(kernel, direction, plan.K, plan.N, why)
            names.append(f"{plan.name} {direction}")
    return names


def give_up(failures: Iterable[Failure]) -> None:
    """Kernels that this rank found it cannot run, after all had agreed on them."""
    for kernel, direction, k, n, why in failures:
        if (kernel, direction, k, n) not in _FAILED:
            _hold(kernel, direction, k, n, why)
            LEDGER.touch()


def apply(plan: SitePlan) -> SitePlan:
    """`plan` with high precision where its kernel failed in this process."""
    if not _FAILED:
        return plan
    changed = {}
    for direction, choice in plan.directions.items():
        why = _FAILED.get((choice.kernel, direction, plan.K, plan.N))
        if why is not None:
            reason = f"{choice.kernel} {FAILED}{why}"
            changed[direction] = choice.kept_high(reason, "demoted")
    return replace(plan, directions={**plan.directions, **changed}) if changed else plan


def _hold(kernel: str, direction: str, k: int, n: int, why: str) -> None:
    _FAILED[kernel, direction, k, n] = why
    BOARD.say((kernel, direction, k, n, why))


def _heard(rank: int, failure: Failure) -> None:
    """A rank, this one too, has told all that a kernel failed on it."""
    kernel, direction, k, n, why = failure
    key = (kernel, direction, k, n)
    if key in _SHARED:
        return
    _SHARED.add(key)
    known = key in _FAILED
    _FAILED[key] = f"rank {rank}: {why}"
    if not known:
        log.warning(
            "loka: %s failed in the %s of K=%d, N=%d on rank %d (%s); in high precision here too",
            *(kernel, direction, k, n, rank, why),
        )
    LEDGER.touch()


#: Every process has one; without other ranks it is never looked at.
BOARD = Board(_heard, lambda: [(*key, why) for key, why in _FAILED.items()])


def _failed_in_place(kernel: str, direction: str, k: int, n: int, error: Exception) -> None:
    """A backward op ran its GEMM in high precision by itself; from the next call on so do all."""
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    _hold(kernel.removesuffix(EMULATED), direction, k, n, why)
    log.warning(
        "loka: %s failed in the %s of K=%d, N=%d (%s); this step ran again in high precision "
        "there, and so will the next",
        kernel,
        direction,
        k,
        n,
        why,
    )
    LEDGER.touch()


in_place.LISTENERS.append(_failed_in_place)
