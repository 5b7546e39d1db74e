"""What FP8 kernels compute anyway is kept: the maximum that a scale of one tensor was made from.

    record_amax   amax () -> the same amax; by the way it is stored in the site's cells

The value flows on to the scale, so the op runs exactly where the maximum is used, and in compiled
code it is no op: its lowering adds two stores to the kernel that finishes the maximum. The cells
are a static input that nothing in a graph reads back, and storing into them is no mutation that
autograd or functionalisation has to know of (they would copy the cells, which would be a kernel).

Our own backward kernel is given the cells and stores its maximum itself.

    cells (WIDTH,) fp32 per site    newest and largest maximum of x, of the output's gradient

Cells are NaN before the first step, largest ones 0.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.lowering.library import LIBRARY

log = logging.getLogger("loka_compile")

#: Places in a site's cells: (newest, largest) of each.
X, GRADIENT = 0, 2
WIDTH = 4

LIBRARY.define("record_amax(Tensor amax, Tensor cells, int at) -> Tensor")


def keep(amax: Tensor, cells: Tensor, at: int) -> None:
    """Store amax () at `at` of cells, as the newest and, where it is, the largest."""
    # An alias with a version counter of its own: the cells are saved for the backward.
    cells = cells.detach().data
    cells[at].copy_(amax)
    cells[at + 1].copy_(torch.maximum(cells[at + 1], amax))


def _record_amax(amax: Tensor, cells: Tensor, at: int) -> Tensor:
    keep(amax, cells, at)
    return amax.clone()


LIBRARY.impl("record_amax", _record_amax, "CompositeExplicitAutograd")


@_compat.register_fake("loka::record_amax", LIBRARY)
def _(amax, cells, at):
    return torch.empty_like(amax)


class _Target(threading.local):
    into: tuple[Tensor, int] | None = None


_target = _Target()


@contextlib.contextmanager
def recording(cells: Tensor | None, at: int) -> Iterator[None]:
    """Maxima found inside are recorded at `at` of `cells`, if there are any."""
    before, _target.into = _target.into, None if cells is None else (cells, at)
    try:
        yield
    finally:
        _target.into = before


def record(amax: Tensor) -> Tensor:
    """`amax`, recorded where `recording` is in force and it is one for the tensor."""
    if _target.into is None or amax.dim() != 0:
        return amax
    cells, at = _target.into
    # Of one operand only: the first maximum in an operand's quantisation is its own.
    _target.into = None
    return torch.ops.loka.record_amax(amax, cells, at)


def cells_of(probe: list[Tensor]) -> Tensor | None:
    """A site's cells in the `probe` argument of its op, which holds them alone, or observers'."""
    return probe[0] if len(probe) == 1 else None


@functools.cache
def install_lowering() -> bool:
    """Teach Inductor the op. False where its inside has changed: then nothing may be recorded."""
    try:
        from torch._inductor import lowering as inductor

        aten = torch.ops.aten
        of: Any = inductor.lowerings
        select, copy, maximum = (
            of[aten.select.int],
            of[aten.copy_.default],
            of[aten.maximum.default],
        )

        @inductor.register_lowering(torch.ops.loka.record_amax.default, type_promotion_kind=None)
        def lower(amax: Any, cells: Any, at: int) -> Any:
            try:
                amax.realize()
                newest, most = (select(cells, 0, at + i) for i in range(2))
                copy(most, maximum(most, amax))
                copy(newest, amax)
            except Exception:
                # A record is not worth a kernel: the value flows on as it would without one.
                log.warning("loka: plain steps do not record their maxima", exc_info=True)
            return amax

    except (ImportError, KeyError, AttributeError, TypeError):
        return False
    return True
