"""Room for results, allocated with little host work: a step allocates hundreds of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

#: What Inductor allocates by: no options to take apart, for the current device.
_ALLOCATE: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
#: The current device; torch without CUDA has none.
_DEVICE: Any = getattr(torch._C, "_cuda_getDevice", None)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, contiguous, in a third of its host time where `device` is the current one. For
    results of settled sizes there are `dense` and `allocator`."""
    if device.type != "cuda" or _ALLOCATE is None or _DEVICE() != device.index:
        return torch.empty(shape, dtype=dtype, device=device)
    made: Tensor = _ALLOCATE(*dense(shape, dtype))
    return made


#: Sizes, strides, dtype: what `allocator` takes.
Room = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def dense(shape: Sequence[int], dtype: torch.dtype) -> Room:
    """Of a contiguous tensor."""
    if len(shape) == 2:
        return tuple(shape), (shape[1] or 1, 1), dtype
    found, width = [], 1
    for size in reversed(shape):
        found.append(width)
        width *= size or 1
    return tuple(shape), tuple(reversed(found)), dtype


def allocator(device: torch.device) -> Callable[[Any, Any, torch.dtype], Tensor]:
    """What allocates a `Room` on `device`, now: it may not be the current one at the next call."""
    if device.type == "cuda" and _ALLOCATE is not None and _DEVICE() == device.index:
        return _ALLOCATE
    return functools.partial(_allocate, device)


def lasting(make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """What `make` allocates for good, ready for any stream when this returns.

    By a thread of its own: while a CUDA graph is warmed up, what this thread allocates is the
    graph's, and counts as leaked. On a stream of its own: work of others would be waited for. Not
    while a graph is captured, which takes no part in what other streams do.
    """
    if device.type != "cuda":
        return make()

    def made() -> Tensor:
        stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            found = make()
            stream.synchronize()
        return found

    with ThreadPoolExecutor(1) as one:
        return one.submit(made).result()


def _allocate(device: torch.device, shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)
