"""dgrad and wgrad as ops that outlive their kernel: what raises runs in high precision, in place.

For ops that run as they are (`inner="eager"`, or where the lowering is not in force). Decomposed,
they are part of a compiled backward, which `loka_compile.recovery` looks after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from loka_compile.lowering import formulas
from loka_compile.lowering.recipes import HIGH_PRECISION

#: Called with (kernel, direction, K, N, error) when a kernel failed.
LISTENERS: list[Callable[[str, str, int, int, Exception], None]] = []

#: As in `loka_compile.demotion`: memory, and mistakes in the program.
NO_KERNELS = (torch.OutOfMemoryError, TypeError, KeyError, AttributeError)


def linear_dgrad(gy: Tensor, w: Tensor, kernel: str, *ready: Any) -> Tensor:
    """As `formulas.linear_dgrad`."""
    try:
        return formulas.linear_dgrad(gy, w, kernel, *ready)
    except Exception as error:
        # Behind them the weight, quantised too; itself it is here in any case.
        gy8, gy_scale = ready[:2]
        _failed(kernel, "dgrad", w.shape[1], w.shape[0], error)
        if gy8 is not None:
            gy = _wide(gy8, gy_scale).reshape(gy.shape).to(gy.dtype)
        return formulas.linear_dgrad(gy, w, HIGH_PRECISION, None, None)


def linear_wgrad(gy: Tensor, x: Tensor | None, kernel: str, *ready: Any) -> Tensor:
    """As `formulas.linear_wgrad`."""
    try:
        return formulas.linear_wgrad(gy, x, kernel, *ready)
    except Exception as error:
        gy8t, gyt_scale, x8t, x_scale = ready[:4]
        k = x8t.shape[0] if x is None else x.shape[-1]
        _failed(kernel, "wgrad", k, gy.shape[-1], error)
        rows = gy.numel() // max(gy.shape[-1], 1)
        dtype = gy.dtype if x is None else x.dtype
        if gy8t is not None:
            gy = _wide(gy8t, gyt_scale)[:, :rows].t().to(dtype)
        if x8t is not None:
            x = _wide(x8t, x_scale)[:, :rows].t().to(dtype)
        return formulas.linear_wgrad(gy, x, HIGH_PRECISION, None, None, None, None)


def _wide(q: Tensor, scale: Tensor) -> Tensor:
    return q.to(torch.float32) * scale


def _failed(kernel: str, direction: str, k: int, n: int, error: Exception) -> None:
    """Tell of it; an error that is no kernel's, or of high precision itself, is raised again."""
    if kernel == HIGH_PRECISION or isinstance(error, NO_KERNELS):
        raise error
    for listener in LISTENERS:
        listener(kernel, direction, k, n, error)
