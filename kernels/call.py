"""Launches of which nothing but addresses changes from step to step, as most of a step's are.

What a launch needs besides is settled once for a signature of the caller's arguments. Then it is
one call of the C function behind Triton's launcher: with addresses, which it takes as they are
(of a tensor it asks the address, and the driver whether that is the GPU's), and with tensor maps
that were made when the address was first seen.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from loka_compile.kernels.launch import Compiled
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import raw_stream


class Box:
    """A block of a tensor that a kernel reads by a descriptor. An object for each operand of each
    call: with an address it stands for a tensor map, so one is for one shape and strides."""

    __slots__ = ("block",)

    def __init__(self, *block: int) -> None:
        self.block = [*block]


class Call:
    """One kernel's launch, of which nothing changes but the addresses and the stream.

    Its arguments are descriptors, pointers, `scalars`, in this order. key, constants and options
    are a `Launcher`'s; the alignment of pointers is seen to here.
    """

    __slots__ = ("_ready", "by", "constants", "device", "grid", "key", "options", "scalars")

    def __init__(
        self,
        by: Launcher,
        grid: tuple[int, ...],
        scalars: tuple[Any, ...],
        constants: dict[str, Any],
        key: Hashable,
        device: torch.device,
        **options: Any,
    ) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        self.grid = (x, y, z)
        self.by, self.scalars, self.constants = by, scalars, constants
        self.key, self.device, self.options = key, device, options
        self._ready: dict[Hashable, Compiled] = {}

    def start(self, pointers: list[int], described: tuple[tuple[int, Box], ...] = ()) -> bool:
        """Start it the short way, if that is open. Where not, False: then it is to be `run`."""
        bits = 0
        for pointer in pointers:
            bits |= pointer
        ready = self._ready.get(not bits & 15 or _flags(pointers))
        if ready is None:
            return False
        front: tuple[Any, ...] = ()
        for place in described:
            found = ready.maps.get(place)
            if found is None:
                return False
            front += found
        stream = raw_stream(self.device.index)
        ready.direct.start(self.grid, stream, (*front, *pointers), self.scalars)  # type: ignore[union-attr]
        return True

    def run(
        self, tensors: tuple[Tensor, ...], described: tuple[tuple[Tensor, Box], ...] = ()
    ) -> None:
        """The long way: the first time, for new tensor maps, and wherever the short one is shut."""
        if described:
            _wake(self.device)
        pointers = [t.data_ptr() for t in tensors]
        even = not any(p & 15 for p in pointers) or _flags(pointers)
        descriptors = [TensorDescriptor.from_tensor(t, box.block) for t, box in described]
        key, compiled = (self.key, even), self._ready.get(even)
        if compiled is None:
            # By Triton, which looks at each tensor whether the GPU can read it.
            args = (*descriptors, *tensors, *self.scalars)
            self.by(key, self.grid, args, self.constants, self.device, **self.options)
        ready = compiled or self.by.compiled(key)
        if ready is None or ready.direct is None:
            return
        front: list[Any] = []
        for i, (t, box) in enumerate(described):
            found = ready.direct.expanded(i, descriptors[i])
            ready.maps[t.data_ptr(), box] = tuple(found)
            front += found
        if compiled is None:
            self._ready[even] = ready
        else:
            stream = raw_stream(self.device.index)
            ready.direct.start(self.grid, stream, (*front, *pointers), self.scalars)


class _Thread(threading.local):
    awake = False


_thread = _Thread()


def _wake(device: torch.device) -> None:
    """A thread that has done nothing on a GPU yet has no context there: launches then make one, but
    the driver makes no tensor map. A thread that captures a graph has."""
    if device.type == "cuda" and not _thread.awake:
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.mem_get_info(device)
        _thread.awake = True


def _flags(pointers: list[int]) -> tuple[bool, ...]:
    return tuple([pointer & 15 == 0 for pointer in pointers])
