"""Launch a Triton kernel with little host work.

`JITFunction.__call__` binds and specialises its arguments at every call: around a hundred
microseconds with tensor descriptors, as much as the kernel runs. A `Launcher` does that once per
specialisation and then starts the compiled kernel directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Launcher:
    """`kernel`: a `triton.jit` function, or what the interpreter makes of one."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        args: Sequence[Any],
        constants: dict[str, Any],
        *,
        num_warps: int,
        num_stages: int = 3,
    ) -> None:
        """`args`: the run-time arguments in the kernel's order; `constants`: the rest, in order."""
        key = (
            tuple([_kind(a) for a in args]),
            tuple(constants.values()),
            num_warps,
            num_stages,
        )
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[(*grid, 1, 1)[:3]](*args, *constants.values())
            return
        made = self.kernel[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages)
        if made is not None:
            self._compiled[key] = made


def _kind(a: Any) -> Any:
    """All that Triton specialises an argument on."""
    if isinstance(a, Tensor):
        return a.dtype, a.data_ptr() % 16 == 0, a.device.index
    if isinstance(a, int):
        return a == 1, a % 16 == 0, -(2**31) <= a < 2**31
    if isinstance(a, float):
        return float
    # A tensor descriptor: its shape and strides are run-time values.
    return a.base.dtype, tuple(a.block_shape), a.base.device.index
