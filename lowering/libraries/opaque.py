"""Library calls as opaque ops: traceable whatever the library is, imported when first run.

Every operand and scale is a
plain contiguous tensor, and each op makes the views that its kernel wants inside, because a
compiler may change the strides of what it passes between ops.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.lowering import direct_calls
from loka_compile.lowering.library import LIBRARY

_TAGS = (torch.Tag.needs_exact_strides,)


def _plain(t: Tensor) -> Tensor:
    """`t` row-major, down to the stride of a dimension of size 1, which `contiguous` leaves as it
    finds it and kernels check all the same."""
    t = t.contiguous()
    strides = (t.shape[1], 1) if t.dim() == 2 else t.stride()
    return t if t.stride() == strides else t.as_strided(t.shape, strides)


def define(
    name: str, arguments: str, function: Callable[..., Tensor], dtype: Callable[..., torch.dtype]
) -> None:
    """`loka::<name>(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, <arguments>) -> Tensor`.

    a (R, C), b (S, C) -> (R, S) in the dtype that `dtype(*arguments)` says.
    """
    head = "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale"
    LIBRARY.define(f"{name}{head}{', ' + arguments if arguments else ''}) -> Tensor", tags=_TAGS)

    def run(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *rest: object) -> Tensor:
        return function(*(_plain(t) for t in (a, a_scale, b, b_scale)), *rest)

    def fake(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *rest: object) -> Tensor:
        return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype(*rest))

    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    direct_calls.register(name, cuda=run, cpu=run)
    _compat.register_fake(f"loka::{name}", LIBRARY)(fake)
