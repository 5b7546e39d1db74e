"""Opaque ops around the kernels of a fused chain's backward, and their plain-torch forms.

fused_chain_backward          dL/dy -> dL/dz, quantised for dgrad and, transposed, for wgrad
fused_chain_backward_groups   the same with a scale per 1 x 128 values, in one read
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.kernels import block_norm as bn
from loka_compile.kernels.epilogue import lanes_of
from loka_compile.kernels.quantize_blockwise import count
from loka_compile.kernels.quantize_blockwise import quantize_groups
from loka_compile.lowering import direct_calls
from loka_compile.lowering import meters
from loka_compile.lowering.chain import round_up
from loka_compile.lowering.chain import turned_copy
from loka_compile.lowering.library import LIBRARY

_SCHEMAS = (
    "fused_chain_backward(Tensor gy, Tensor u, Tensor r, Tensor? gain, int block, str act, "
    "bool gate, bool rows, ScalarType dtype, bool rows_t, ScalarType dtype_t, "
    "Tensor? cells=None) "
    "-> (Tensor q, Tensor scale, Tensor qt, Tensor scale_t, Tensor ggain)",
    "fused_chain_backward_groups(Tensor gy, Tensor u, Tensor r, Tensor? gain, int block, str act, "
    "bool gate, ScalarType dtype, ScalarType dtype_t) "
    "-> (Tensor q, Tensor scale, Tensor qt, Tensor scale_t, Tensor ggain)",
)
for _schema in _SCHEMAS:
    LIBRARY.define(_schema)


@_compat.register_fake("loka::fused_chain_backward", LIBRARY)
def _(gy, u, r, gain, block, act, gate, rows, dtype, rows_t, dtype_t, cells=None):
    m, n = u.shape
    return (
        u.new_empty((m, n), dtype=dtype),
        u.new_empty((m, 1) if rows else (), dtype=torch.float32),
        u.new_empty((n, round_up(m)), dtype=dtype_t),
        u.new_empty((n, 1) if rows_t else (), dtype=torch.float32),
        _gain_sums(gain, n, block, u),
    )


def _gain_sums(gain: Tensor | None, n: int, block: int, like: Tensor) -> Tensor:
    """Room for dL/dgain as partial sums, which are added up where a compiler can fuse that."""
    shape = (0,) if gain is None else (lanes_of(n, block), n)
    return like.new_empty(shape, dtype=torch.float32)


def fused_chain_backward_ref(
    gy: Tensor,
    u: Tensor,
    r: Tensor,
    gain: Tensor | None,
    block: int,
    act: str,
    gate: bool,
    rows: bool,
    dtype: torch.dtype,
    rows_t: bool,
    dtype_t: torch.dtype,
    cells: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The op in plain FP32 torch. Quantises the FP32 gradient: no rounding to bf16 in between.

    -> q, scale, qt, scale_t, dL/dgain as partial sums (lanes, N): here the first is the whole.
    cells: take the gradient's maximum, where both scales are of the tensor (`meters.py`).
    """
    from loka_compile.kernels import quantize as q
    from loka_compile.lowering.chain_formulas import block_norm_act_backward

    wide = bn.wide_dtype(u.dtype)
    gz, ggain = block_norm_act_backward(gy.to(wide), u.to(wide), r, gain, block, act, gate)
    sums = _gain_sums(gain, u.shape[1], block, u)
    if gain is not None:
        sums.zero_()[0] = ggain
    gz = gz.to(torch.float32)
    if cells is not None and not rows and not rows_t:
        meters.keep(q.amax_tensorwise(gz), cells, meters.GRADIENT)

    def one(t: Tensor, per_row: bool, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        amax = q.amax_rowwise(t) if per_row else q.amax_tensorwise(t)
        return q.quantize(t, amax, kind)

    first, scale = one(gz, rows, dtype)
    second, scale_t = one(gz.t(), rows_t, dtype_t)
    return first, scale, turned_copy(second.t()), scale_t, sums


@functools.cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any], type]:
    """Imported late: the package must import where Triton is missing."""
    from loka_compile.kernels.fused_backward import fused_backward
    from loka_compile.kernels.fused_backward_blocks import fused_backward_blocks
    from loka_compile.kernels.orientations import Scale

    return fused_backward, fused_backward_blocks, Scale


def _fused_chain_backward_cuda(
    gy, u, r, gain, block, act, gate, rows, dtype, rows_t, dtype_t, cells=None
):
    return _kernels()[0](
        gy, u, r, gain, block, act, gate, rows, dtype, rows_t, dtype_t,
        cells=None if rows or rows_t else cells, at=meters.GRADIENT,
    )  # fmt: skip


LIBRARY.impl("fused_chain_backward", fused_chain_backward_ref, "CPU")
LIBRARY.impl("fused_chain_backward", _fused_chain_backward_cuda, "CUDA")
direct_calls.register(
    "fused_chain_backward",
    checked=False,
    cuda=_fused_chain_backward_cuda,
    cpu=fused_chain_backward_ref,
)


@_compat.register_fake("loka::fused_chain_backward_groups", LIBRARY)
def _(gy, u, r, gain, block, act, gate, dtype, dtype_t):
    m, n = u.shape
    sums = (0,) if gain is None else (count(m), n)
    return (
        u.new_empty((m, n), dtype=dtype),
        u.new_empty((m, count(n)), dtype=torch.float32),
        u.new_empty((n, round_up(m)), dtype=dtype_t),
        u.new_empty((n, count(m)), dtype=torch.float32),
        u.new_empty(sums, dtype=torch.float32),
    )


def fused_chain_backward_groups_ref(
    gy: Tensor,
    u: Tensor,
    r: Tensor,
    gain: Tensor | None,
    block: int,
    act: str,
    gate: bool,
    dtype: torch.dtype,
    dtype_t: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The op in plain FP32 torch.

    -> q (M, N), scale (M, groups of N), qt (N, M up to 16), scale_t (N, groups of M), dL/dgain as
    partial sums (groups of M, N): here the first is the whole.
    """
    from loka_compile.lowering.chain_formulas import block_norm_act_backward

    wide = bn.wide_dtype(u.dtype)
    gz, ggain = block_norm_act_backward(gy.to(wide), u.to(wide), r, gain, block, act, gate)
    m, n = gz.shape
    sums = u.new_zeros((0,) if gain is None else (count(m), n), dtype=torch.float32)
    if gain is not None and m > 0:
        sums[0] = ggain
    q, scale = quantize_groups(gz.to(torch.float32), dtype)
    # The kernel keeps dL/dz as bf16 until the scale of its column is known.
    columns, scale_t = quantize_groups(gz.to(torch.bfloat16).t(), dtype_t)
    return q.contiguous(), scale, turned_copy(columns.t()), scale_t.contiguous(), sums


@functools.cache
def _by_groups(dtype: torch.dtype) -> Any:
    return _kernels()[2]("1x128", dtype)


def _fused_chain_backward_groups_cuda(gy, u, r, gain, block, act, gate, dtype, dtype_t):
    rules = _by_groups(dtype), _by_groups(dtype_t)
    made, sums = _kernels()[1](gy, u, r, gain, block, act, gate, *rules)
    return made.q, made.scale, made.qt, made.scale_t, sums


LIBRARY.impl("fused_chain_backward_groups", fused_chain_backward_groups_ref, "CPU")
LIBRARY.impl("fused_chain_backward_groups", _fused_chain_backward_groups_cuda, "CUDA")
direct_calls.register(
    "fused_chain_backward_groups",
    checked=False,
    cuda=_fused_chain_backward_groups_cuda,
    cpu=fused_chain_backward_groups_ref,
)
