"""What FP8 kernels compute anyway is kept: the maximum that a scale of one tensor was made from.

    record_amax   amax () -> the same amax; by the way it is stored in the site's cells

The value flows on to the scale, so the op runs exactly where the maximum is used, and in compiled
code it is no op: its lowering adds one store to the kernel that finishes the maximum. The cells
are a static input that nothing in a graph reads back, and storing into them is no mutation that
autograd or functionalisation has to know of (they would copy the cells, which would be a kernel).

Inductor orders stores into one tensor, and what waits for another store is a kernel of its own. So
newest and largest are the halves of one integer, and sites that may end up in one kernel, which are
never far apart in a graph, lie in different tensors. (A tensor for every site would be an input for
every site: more host work than the record is worth.)

Our own backward kernel is given the cell and stores its maximum itself.

    cells (CELLS,) int64 per site    of x, of the output's gradient: the bits of the newest maximum
                                     in the low half, of the largest in the high one

Cells are NaN and 0 before the first step.
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

#: A site's cells.
X, GRADIENT = 0, 1
CELLS = 2
#: Tensors that the sites of a graph take in turn.
TENSORS = 8

#: Of FP32: all but the sign. Maxima of magnitudes order like their bits, NaN above all.
_MAGNITUDE = 0x7FFFFFFF

LIBRARY.define("record_amax(Tensor amax, Tensor cells, int at) -> Tensor")


def keep(amax: Tensor, cells: Tensor, at: int) -> None:
    """Store amax () at `at` of cells, as the newest and, where it is, the largest."""
    # An alias with a version counter of its own: the cells are saved for the backward.
    cell = cells.detach().data[at]
    bits = amax.view(torch.int32).to(torch.int64) & _MAGNITUDE
    cell.copy_((torch.maximum(cell >> 32, bits) << 32) | bits)


def _record_amax(amax: Tensor, cells: Tensor, at: int) -> Tensor:
    keep(amax, cells, at)
    return amax.clone()


LIBRARY.impl("record_amax", _record_amax, "CompositeExplicitAutograd")


@_compat.register_fake("loka::record_amax", LIBRARY)
def _(amax, cells, at):
    return torch.empty_like(amax)


def shape_of(sites: int) -> tuple[int, int, int]:
    """Of the cells of so many sites: (tensors, sites of each, cells)."""
    tensors = min(sites, TENSORS)
    return tensors, -(-sites // tensors), CELLS


def place_of(index: int, sites: int) -> tuple[int, int]:
    """Tensor and row of the site at `index`."""
    tensors = min(sites, TENSORS)
    return index % tensors, index // tensors


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
        from torch._inductor.virtualized import ops

        aten = torch.ops.aten
        of: Any = inductor.lowerings
        select, copy = of[aten.select.int], of[aten.copy_.default]

        def packed(amax: Any, cell: Any) -> Any:
            half, sign = (ops.constant(n, torch.int64) for n in (32, _MAGNITUDE))
            bits = ops.to_dtype_bitcast(amax, torch.int32, torch.float32)
            bits = ops.bitwise_and(ops.to_dtype(bits, torch.int64), sign)
            most = ops.maximum(ops.bitwise_right_shift(cell, half), bits)
            return ops.bitwise_or(ops.bitwise_left_shift(most, half), bits)

        pack = inductor.make_pointwise(packed, override_return_dtype=torch.int64)

        @inductor.register_lowering(torch.ops.loka.record_amax.default, type_promotion_kind=None)
        def lower(amax: Any, cells: Any, at: int) -> Any:
            try:
                amax.realize()
                cell = select(cells, 0, at)
                copy(cell, pack(amax, cell))
            except Exception:
                # A record is not worth a kernel: the value flows on as it would without one.
                log.warning("loka: plain steps do not record their maxima", exc_info=True)
            return amax

    except (ImportError, KeyError, AttributeError, TypeError):
        return False
    return True
