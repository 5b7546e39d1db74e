"""How observers in compiled code find their state: by the address of a cell.

The state of a site is nine tensors. As inputs of a graph, those of two dozen sites are two hundred,
and torch looks at every input several times per call: that was most of a probed step. So a graph
that observes takes three small tensors, whatever its sites:

    cells (G, 1) int64             one row per state group, the input or the gradient of a site. An
                                   observer gets a view of its own, whose address says which group;
                                   what is in it nobody reads or writes
    forward, backward (1,) int64   what observers say they write to, so that no compiler drops them
                                   or swaps two. Nobody looks at them: copies would do as well
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loka_compile.probe.statistics import Statistics

CELLS, FORWARD, BACKWARD = range(3)
#: Bytes of a cell.
_CELL = 8


@dataclass(eq=False)
class Place:
    """One state group of one graph and set of parameters."""

    held: Statistics
    #: Left out of the step that runs (`turns.py`).
    rests: bool = False


_AT: dict[int, Place] = {}
#: Cells on GPUs, for good: a recorded CUDA graph writes to the state that it found at their
#: addresses, and is told from one of other state by these.
_KEPT: list[Tensor] = []


class Places:
    """Of one graph and set of parameters, `held` in the order of the graph's groups. Observers find
    nothing any more once it is gone."""

    def __init__(self, held: Sequence[Statistics], device: torch.device) -> None:
        self.groups = [Place(one) for one in held]
        shapes = shapes_of(len(self.groups))
        #: What the graph takes.
        self.tensors = tuple(torch.zeros(s, dtype=torch.int64, device=device) for s in shapes)
        if device.type == "cuda":
            _KEPT.append(self.tensors[CELLS])
        first = self.tensors[CELLS].data_ptr()
        addresses = range(first, first + _CELL * len(self.groups), _CELL)
        _AT.update(zip(addresses, self.groups, strict=True))
        # The next tensor there is somebody else's.
        weakref.finalize(self, _forget, addresses)

    def hold(self, held: Sequence[Statistics]) -> bool:
        """Are these the groups, in this order."""
        mine = [id(group.held) for group in self.groups]
        return mine == list(map(id, held))


def shapes_of(groups: int) -> tuple[tuple[int, ...], ...]:
    """Of the tensors that a graph with so many groups takes."""
    return (groups, 1), (1,), (1,)


def _forget(addresses: range) -> None:
    for address in addresses:
        _AT.pop(address, None)


def at(cell: Tensor) -> Place | None:
    """The group whose cell this is; None where it is gone."""
    return _AT.get(cell.data_ptr())
