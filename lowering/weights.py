"""A training step's weight as FP8 for its forward and its dgrad, from one read.

    quantize_weight   w (N, K) -> w8 (N, K) and its scale, w8t (K, N) and its scale

Opaque: one kernel writes both orientations, where Inductor would make one kernel for each and read
the weight again for each maximum. Without Triton the plain formula runs. The values are those that
`gemm.operand` gives, so whoever takes them computes the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.kernels.orientations import Both
from loka_compile.kernels.orientations import Scale
from loka_compile.kernels.orientations import quantize_both_ref
from loka_compile.kernels.orientations import round_up
from loka_compile.lowering import chain
from loka_compile.lowering import direct_calls
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.library import LIBRARY
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION

_KINDS = ("tensor", "row", "128x128")


def scale_of(kernel: str, direction: str) -> Scale | None:
    """How `kernel` reads the weight in `direction`, where our quantiser can give it; else None."""
    if kernel == HIGH_PRECISION or kernel.endswith(EMULATED):
        return None
    library, recipe, _ = split_kernel_name(kernel)
    rule = library.recipes[recipe].gemm(direction)
    if rule is None or not library.own_scales or rule.b.granularity.value not in _KINDS:
        return None
    # Libraries lay out block scales themselves, from this layout.
    return Scale(rule.b.granularity.value, rule.b.dtype)


@functools.cache
def scales(fwd: str, dgrad: str) -> tuple[Scale, Scale]:
    """Of kernels that `scale_of` knows."""
    straight, turned = scale_of(fwd, "fwd"), scale_of(dgrad, "dgrad")
    assert straight is not None and turned is not None, (fwd, dgrad)
    return straight, turned


LIBRARY.define(
    "quantize_weight(Tensor w, ScalarType dtype, str fwd, str dgrad) "
    "-> (Tensor w8, Tensor w_scale, Tensor w8t, Tensor wt_scale)"
)


@_compat.register_fake("loka::quantize_weight", LIBRARY)
def _(w, dtype, fwd, dgrad):
    straight, turned = scales(fwd, dgrad)
    n, k = w.shape
    n_up, k_up = round_up(n), round_up(k)
    return (
        w.new_empty((n if chain.is_own(fwd) else n_up, k_up), dtype=straight.dtype),
        w.new_empty(straight.shape(n, k), dtype=torch.float32),
        w.new_empty((k_up, n_up), dtype=turned.dtype),
        w.new_empty(turned.shape(k, n), dtype=torch.float32),
    )


def quantize_weight(w: Tensor, dtype: torch.dtype, fwd: str, dgrad: str) -> tuple[Tensor, ...]:
    """w (N, K), taken in `dtype` -> (w8, w_scale, w8t, wt_scale); sizes filled up to 16 with zeros.

    The rows of w8 stay N where our own kernel reads it: its result has as many columns.
    """
    straight, turned = scales(fwd, dgrad)
    up = {"rows_up": not chain.is_own(fwd), "columns_up": True}
    out = both(w.device)(w, straight, turned, dtype=dtype, **up)
    assert out.q is not None and out.scale is not None
    assert out.qt is not None and out.scale_t is not None
    return out.q, out.scale, out.qt, out.scale_t


def both(device: torch.device) -> Callable[..., Both]:
    """`kernels.quantize_both` where it runs, else its reference."""
    if device.type != "cuda" or _compat.why_no_triton() is not None:
        return quantize_both_ref
    return _kernel()


@functools.cache
def _kernel() -> Callable[..., Both]:
    """Imported late: the package must import where Triton is missing."""
    from loka_compile.kernels.quantize_both import quantize_both

    return quantize_both


LIBRARY.impl("quantize_weight", quantize_weight, "CompositeExplicitAutograd")
direct_calls.register("quantize_weight", checked=False, cuda=quantize_weight, cpu=quantize_weight)
