"""The opaque op around our own Triton kernel, and the plain-torch form that runs without a GPU.

    fused_chain   e4m3 operands -> GEMM, addend, BlockNorm, gain, activation (one kernel)

It stays opaque under Inductor: decomposed, the epilogue and the GEMM would be separate kernels.
Quantising its inputs is not part of it, so Inductor fuses that into producers. Its backward:
`chain_backward`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.kernels import block_norm as bn
from loka_compile.kernels.epilogue import epilogue_ref
from loka_compile.kernels.epilogue import pointwise_ref
from loka_compile.kernels.quantize import quantize_static
from loka_compile.kernels.quantize_blockwise import BLOCK
from loka_compile.kernels.quantize_blockwise import fill
from loka_compile.kernels.quantize_blockwise import spread_blocks
from loka_compile.kernels.quantize_blockwise import spread_groups
from loka_compile.lowering import direct_calls
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.library import LIBRARY
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.recipes import Gemm
from loka_compile.lowering.recipes import Granularity
from loka_compile.lowering.recipes import Operand

E4M3 = torch.float8_e4m3fn

#: Kernel names of our own library begin so.
OWN = "loka:"


def is_own(kernel: str) -> bool:
    """The kernel is ours and runs for real: the chain is one opaque op."""
    return kernel.startswith(OWN) and not kernel.endswith(EMULATED)


def rule_of(kernel: str, direction: str = "fwd") -> Gemm:
    library, recipe, _ = split_kernel_name(kernel)
    rule = library.recipes[recipe].gemm(direction)
    assert rule is not None, (kernel, direction)
    return rule


def backward_rules(fwd: str, dgrad: str, wgrad: str) -> tuple[Operand, Operand] | None:
    """How dL/dz is quantised for dgrad and wgrad, where our backward kernel can do both; else None.

    It belongs to our own forward, and writes power-of-two scales per tensor or per row.
    """
    first, second = gradient_rule("dgrad", dgrad), gradient_rule("wgrad", wgrad)
    if not is_own(fwd) or first is None or second is None:
        return None
    return first, second


def group_rules(
    fwd: str, dgrad: str, wgrad: str, n: int, block: int
) -> tuple[Operand, Operand] | None:
    """As `backward_rules`, where both read dL/dz with a scale per 1 x 128 values: in one read.

    Groups of 128 features must not cross blocks.
    """
    kernels = (dgrad, wgrad)
    if not is_own(fwd) or any(k == HIGH_PRECISION or k.endswith(EMULATED) for k in kernels):
        return None
    if block % BLOCK and n > block:
        return None
    rules = []
    for direction, kernel in zip(("dgrad", "wgrad"), kernels, strict=True):
        library, recipe, _ = split_kernel_name(kernel)
        rule = library.recipes[recipe].gemm(direction)
        if rule is None or rule.a.granularity is not Granularity.GROUP or not library.own_scales:
            return None
        rules.append(rule.a)
    return rules[0], rules[1]


@functools.cache
def gradient_rule(direction: str, kernel: str) -> Operand | None:
    """How this dgrad or wgrad kernel reads dL/dz, if our backward kernel can write that."""
    if kernel == HIGH_PRECISION or kernel.endswith(EMULATED):
        return None
    library, recipe, _ = split_kernel_name(kernel)
    rule = library.recipes[recipe].gemm(direction)
    if rule is None or rule.a.blocks or not rule.a.scaled or not library.own_scales:
        return None
    return rule.a


_SCHEMA = (
    "fused_chain(Tensor a, Tensor a_scale, Tensor w, Tensor w_scale, Tensor? addend, "
    "Tensor? gain, int block, "
    "float eps, bool norm, str act, bool gate, bool fast_accum, ScalarType dtype, "
    "Tensor? out_scale, "
    "bool save, bool transposed) -> (Tensor y, Tensor yt, Tensor u, Tensor r)"
)
LIBRARY.define(_SCHEMA)


def round_up(m: int, to: int = 16) -> int:
    """Spelled `to * (...)`, so that divisibility of a symbolic result is known without a guard."""
    if isinstance(m, int) and m % to == 0:
        return m
    return to * ((m + to - 1) // to)


def _outputs(
    a: Tensor,
    w: Tensor,
    block: int,
    dtype: torch.dtype,
    fp8: bool,
    save: bool,
    transposed: bool,
    norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, n = a.shape[0], w.shape[0]
    out = E4M3 if fp8 else dtype
    y = a.new_empty((m, n), dtype=out)
    yt = a.new_empty((n, round_up(m)) if transposed else (0,), dtype=out)
    u = a.new_empty((m, n) if save else (0,), dtype=dtype)
    r = a.new_empty((m, bn.count_blocks(n, block)) if save and norm else (0,), dtype=torch.float32)
    return y, yt, u, r


@_compat.register_fake("loka::fused_chain", LIBRARY)
def _(
    a, a_scale, w, w_scale, addend, gain, block, eps, norm, act, gate, fast, dtype, out_scale,
    save, turned,
):  # fmt: skip
    return _outputs(a, w, block, dtype, out_scale is not None, save, turned, norm)


def grouped(w: Tensor, w_scale: Tensor) -> bool:
    """Scales of 128 x 128 values of w (N, K), and so of 1 x 128 of the other operand."""
    return w_scale.dim() == 2 and w_scale.shape[0] != w.shape[0]


def product_ref(a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
    """a (M, K), w (N, K) e4m3 and scales, () or per row or `grouped` -> FP32 (M, N)."""
    if grouped(w, w_scale):
        a_scale = spread_groups(a_scale, a.shape[1])
        w_scale = spread_blocks(w_scale, *w.shape)
    else:
        a_scale, w_scale = a_scale.reshape(-1, 1), w_scale.reshape(-1, 1)
    return (a.to(torch.float32) * a_scale) @ (w.to(torch.float32) * w_scale).t()


def fused_chain_ref(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    addend: Tensor | None,
    gain: Tensor | None,
    block: int,
    eps: float,
    norm: bool,
    act: str,
    gate: bool,
    fast_accum: bool,
    dtype: torch.dtype,
    out_scale: Tensor | None,
    save: bool,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The op in plain FP32 torch: what CPU runs, and what the kernel is tested against.

    addend (M, N): z = a @ w.T + addend; for the rest see `kernels.fused_forward`.
    """
    y, yt, u, r = _outputs(a, w, block, dtype, out_scale is not None, save, transposed, norm)
    _, z = pointwise_ref(product_ref(a, a_scale, w, w_scale), None, None, addend)
    wide, normal, inverse = epilogue_ref(z, gain, block, eps, act, gate, norm=norm)
    y = wide.to(dtype) if out_scale is None else quantize_static(wide, out_scale, E4M3)
    if save:
        # A result of its own: without activation and gain it is what y was made of.
        u, r = normal.to(dtype, copy=True), inverse if norm else r
    if transposed:
        yt = turned_copy(y)
    return y, yt, u, r


def turned_copy(q: Tensor) -> Tensor:
    """(M, N) -> (N, M up to 16), zero-filled past M. Shares no memory with q."""
    return fill(q.t().clone(memory_format=torch.contiguous_format), 1, 16)


@functools.cache
def fused_kernel() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The kernel by place, and what allocates on a device. Imported late: the package must import
    where Triton is missing."""
    from loka_compile.kernels.fused_forward import forward
    from loka_compile.kernels.room import allocator

    return forward, allocator


def _fused_chain_cuda(
    a, a_scale, w, w_scale, addend, gain, block, eps, norm, act, gate, fast, dtype, out_scale,
    save, turned,
):  # fmt: skip
    forward, allocator = fused_kernel()
    y, yt, u, r = forward(
        a, a_scale, w, w_scale, gain, None, None, addend, out_scale, block, eps, act, gate, dtype,
        dtype if save else None, turned, norm, fast, grouped(w, w_scale),
    )  # fmt: skip
    if yt is None or u is None or r is None:
        make = allocator(y.device)
        yt = make((0,), (1,), y.dtype) if yt is None else yt
        u = make((0,), (1,), dtype) if u is None else u
        r = make((0,), (1,), torch.float32) if r is None else r
    return y, yt, u, r


LIBRARY.impl("fused_chain", fused_chain_ref, "CPU")
LIBRARY.impl("fused_chain", _fused_chain_cuda, "CUDA")
direct_calls.register("fused_chain", checked=False, cuda=_fused_chain_cuda, cpu=fused_chain_ref)
