"""How observers in compiled code find their state: by the address of a cell.

The state of a site is nine tensors. As inputs of a graph, those of two dozen sites are two hundred,
and torch looks at every input several times per call: that was most of a probed step. So a graph
that observes takes three small tensors, whatever its sites:

    cells (G, 1) int64             one row per state group, the input or the gradient of a site. An
                                   observer gets a view of its own, whose address says which group.
                                   The group's number stands in it, for observers that are given a
                                   copy: of what a forward saves for its backward, a hook may keep
                                   one (`torch.autograd.graph.save_on_cpu`)
    forward, backward (1,) int64   what observers say they write to, so that no compiler drops them
                                   or swaps two. Nobody looks at them: copies would do as well
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from itertools import pairwise

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.options import PROBE_STEPS
from loka_compile.probe.forwards import Forward
from loka_compile.probe.forwards import Pairing
from loka_compile.probe.forwards import Passing
from loka_compile.probe.statistics import Statistics

log = logging.getLogger("loka_compile")

CELLS, FORWARD, BACKWARD = range(3)
#: Bytes of a cell.
_CELL = 8


@dataclass(eq=False)
class Place:
    """One state group of one graph and set of parameters."""

    held: Statistics
    #: Left out of the step that runs (`turns.py`).
    rests: bool = False
    #: The state of the same site's other half: of an input the gradient's, and the other way round.
    other: Statistics | None = None
    passing: Passing = field(default_factory=Passing)

    @property
    def is_gradient(self) -> bool:
        return self.held.pairing is not None


_AT: dict[int, Place] = {}
_BY_NUMBER: dict[int, Place] = {}
_count = itertools.count()
#: Numbers lie far apart, so that one that a lossy copy has changed is no other group's; odd, so
#: that the inverse tells it from the number of a group that is gone.
_ODD, _ALL = 0x9E3779B97F4A7C15, 1 << 64
_INVERSE = pow(_ODD, -1, _ALL)
#: What was said of copies that lead nowhere.
_SAID: set[str] = set()
#: Cells on GPUs, for good: a recorded CUDA graph writes to the state that it found at their
#: addresses, and is told from one of other state by these.
_KEPT: list[Tensor] = []


class Places:
    """Of one graph and set of parameters, `held` in the order of the graph's groups. Observers find
    nothing any more once it is gone."""

    def __init__(self, held: Sequence[Statistics], device: torch.device) -> None:
        #: Whose gradients go through the graph.
        self.passing = Passing()
        self.groups = [Place(one, passing=self.passing) for one in held]
        for one, next_one in pairwise(self.groups):
            # A site's two groups stand next to each other, its input's first.
            if next_one.is_gradient and not one.is_gradient:
                one.other, next_one.other = next_one.held, one.held
        shapes = shapes_of(len(self.groups))
        #: What the graph takes.
        self.tensors = tuple(torch.zeros(s, dtype=torch.int64, device=device) for s in shapes)
        if device.type == "cuda":
            _KEPT.append(self.tensors[CELLS])
        first = self.tensors[CELLS].data_ptr()
        addresses = range(first, first + _CELL * len(self.groups), _CELL)
        numbers = [_number(next(_count)) for _ in self.groups]
        self.tensors[CELLS].copy_(torch.tensor(numbers, dtype=torch.int64).unsqueeze(1))
        _AT.update(zip(addresses, self.groups, strict=True))
        _BY_NUMBER.update(zip(numbers, self.groups, strict=True))
        # The next tensor there is somebody else's.
        weakref.finalize(self, _forget, addresses, numbers)

    def hold(self, held: Sequence[Statistics]) -> bool:
        """Are these the groups, in this order."""
        mine = [id(group.held) for group in self.groups]
        return mine == list(map(id, held))

    def starts(self, *, again: bool, replayed: bool) -> tuple[Forward, bool]:
        """A forward starts: what stands for it, and whether the rows that are recorded in it are
        going to be paired with their gradients.

        again: a checkpoint's second one. replayed: a CUDA graph may run it without any observer
        being asked. Then nobody can say whose gradients come, so that forwards and backwards must
        take turns.
        """
        forward, paired = Forward(named=not replayed), True
        if replayed and not again:
            for one in self._pairings():
                paired &= one.replays()
        return forward, paired

    def goes_through(self, forward: Forward) -> None:
        """Gradients are about to go through the graph of that forward."""
        if forward.named:
            self.passing.starts(forward)
            return
        number = _compat.backward_number()
        if forward.backward != number:
            # Results may be several: each of them tells.
            forward.backward = number
            for one in self._pairings():
                one.ended += 1

    def _pairings(self) -> list[Pairing]:
        return [one.held.pairing for one in self.groups if one.held.pairing is not None]


def shapes_of(groups: int) -> tuple[tuple[int, ...], ...]:
    """Of the tensors that a graph with so many groups takes."""
    return (groups, 1), (1,), (1,)


def _forget(addresses: Iterable[int], numbers: Iterable[int]) -> None:
    for address in addresses:
        _AT.pop(address, None)
    for number in numbers:
        _BY_NUMBER.pop(number, None)


def _number(which: int) -> int:
    """int64, of the group that was made after so many others."""
    found = (which + 1) * _ODD % _ALL
    return found - _ALL if found >= _ALL // 2 else found


def _was_given(number: int) -> bool:
    return 0 < number * _INVERSE % _ALL < (1 << 32)


def at(cell: Tensor) -> Place | None:
    """The group whose cell, or copy of one, this is; None where it is gone."""
    found = _AT.get(cell.data_ptr())
    return found if found is not None or not _AT else _of_copy(cell)


def _of_copy(cell: Tensor) -> Place | None:
    """By the number in it, for which the host waits: only hooks that copy get here."""
    if cell.is_cuda and torch.cuda.is_current_stream_capturing():
        _say("while a CUDA graph is recorded, which cannot be read")
        return None
    if cell.dtype != torch.int64:
        _say(f"that is {str(cell.dtype).removeprefix('torch.')}")
        return None
    number = int(cell.item())
    if number not in _BY_NUMBER and not _was_given(number):
        _say("that holds another number")
    return _BY_NUMBER.get(number)


def _say(what: str) -> None:
    if what not in _SAID:
        _SAID.add(what)
        log.warning(
            "loka: probes record no gradients here: saved-tensor hooks gave the backward a copy %s "
            "(of a tensor that tells sites apart). Without gradients no site is planned. Let the "
            "hooks pass integer tensors through as they are, or run the first %d steps without "
            "the hooks and pin the plan: loka_compile.plan_of(model).save(path), then "
            'options={"plan": path}',
            what,
            PROBE_STEPS,
        )
