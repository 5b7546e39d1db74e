"""Launch a Triton kernel with little host work.

A `triton.jit` function binds and specialises its arguments at every call. A `Launcher` does that
once per specialisation and then starts the compiled kernel directly. Where all that changes from
step to step are addresses, a `Call` (`call.py`) costs less again.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.kernels.room import empty as empty

#: Of the current stream of a device; torch without CUDA has none.
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Recipes(dict[Hashable, Any]):
    """What a call site works out once per signature of its arguments, so that a step does not.

    Bounded: batches of many sizes start over rather than fill the memory.
    """

    MOST = 4096

    def __setitem__(self, signature: Hashable, recipe: Any) -> None:
        if len(self) >= self.MOST:
            self.clear()
        super().__setitem__(signature, recipe)


@dataclass
class Compiled:
    """What a `Launcher` compiled; `direct` where Triton's launcher is known and can be left out."""

    kernel: Any
    direct: _compat.DirectLaunch | None
    #: Some of its arguments are descriptors: those do not go into `direct` as they are.
    described: bool
    #: (address, box) -> a tensor map and what comes with it; see `Call`. The allocator gives a step
    #: the addresses of the step before.
    maps: Recipes


class Launcher:
    """`kernel`: a `triton.jit` function, or what the interpreter makes of one."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Hashable, Compiled] = {}

    def __call__(
        self,
        key: Hashable,
        grid: tuple[int, ...],
        args: Sequence[Any],
        constants: dict[str, Any],
        device: torch.device,
        *,
        num_warps: int,
        num_stages: int = 3,
        pdl: bool = False,
    ) -> None:
        """`args`: the run-time arguments in the kernel's order; `constants`: the rest, in order.

        `key` must tell apart all that Triton specialises on: dtypes, alignment of pointers, and of
        integers whether they are 1, multiples of 16, or beyond 32 bits; see `kind`. It need not
        hold `constants`' values where other parts of it settle them. pdl: programmatic dependent
        launch; the kernel itself must then wait for the kernel before it (see `overlaps`).
        """
        compiled = self._compiled.get(key)
        if compiled is None:
            options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
            made = self.kernel[grid](
                *args, **constants, num_warps=num_warps, num_stages=num_stages, **options
            )
            if made is not None:
                described = any(hasattr(one, "block_shape") for one in args)
                direct = _compat.direct_launch(made, args)
                self._compiled[key] = Compiled(made, direct, described, Recipes())
            return
        start(compiled, grid, args, constants.values(), device)

    def compiled(self, key: Hashable) -> Compiled | None:
        """What a call with `key` compiled, for `start`; None in the interpreter."""
        return self._compiled.get(key)


def start(
    compiled: Compiled,
    grid: tuple[int, ...],
    args: Sequence[Any],
    constants: Iterable[Any],
    device: torch.device,
) -> None:
    """Start a kernel that a `Launcher` compiled."""
    x, y, z = (*grid, 1, 1)[:3]
    stream = raw_stream(device.index)
    direct, kernel = compiled.direct, compiled.kernel
    if direct is not None and not compiled.described:
        direct.start((x, y, z), stream, args, ())
        return
    # Without the hooks that profilers of Triton's own set: this is the path of every step.
    metadata = kernel.packed_metadata
    kernel.run(
        x, y, z, stream, kernel.function, metadata, None, None, None, *args, *constants
    )  # fmt: skip


@functools.cache
def overlaps(device: torch.device) -> bool:
    """The device can start a kernel's programs before the kernel ahead of it has ended (Hopper on).

    Such a kernel calls `gdc_wait` before it touches memory, and `gdc_launch_dependents` first of
    all, so that the same holds for the kernel after it. Any other kernel waits as it always did.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have."""
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 64 << 10))


def kind(*sizes: int) -> tuple[int, ...]:
    """What Triton specialises integers on."""
    return tuple(
        [1 if s == 1 else (2 if s % 16 == 0 else 0) | (4 if s >= 2**31 else 0) for s in sizes]
    )


def aligned(*tensors: Tensor | None) -> bool:
    """All pointers are multiples of 16 bytes."""
    bits = 0
    for t in tensors:
        if t is not None:
            bits |= t.data_ptr()
    return bits % 16 == 0
