"""Opaque ops around our own Triton kernels, and the plain-torch form that runs without a GPU.

    fused_chain            e4m3 operands -> GEMM, addend, BlockNorm, gain, activation (one kernel)
    fused_chain_backward   dL/dy -> dL/dz, quantised for dgrad and, transposed, for wgrad

They stay opaque under Inductor: decomposed, the epilogue and the GEMM would be separate kernels.
Quantising the inputs of `fused_chain` is not part of it, so Inductor fuses that into producers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka_compile.kernels import block_norm as bn
from loka_compile.kernels.epilogue import epilogue_ref
from loka_compile.kernels.epilogue import lanes_of
from loka_compile.kernels.epilogue import pointwise_ref
from loka_compile.kernels.quantize import quantize_static
from loka_compile.lowering import meters
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.library import LIBRARY
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.recipes import Gemm
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


def gradient_rule(direction: str, kernel: str) -> Operand | None:
    """How this dgrad or wgrad kernel reads dL/dz, if our backward kernel can write that."""
    if kernel == HIGH_PRECISION or kernel.endswith(EMULATED):
        return None
    library, recipe, _ = split_kernel_name(kernel)
    rule = library.recipes[recipe].gemm(direction)
    if rule is None or rule.a.blocks or not rule.a.scaled or not library.own_scales:
        return None
    return rule.a


_SCHEMAS = (
    "fused_chain(Tensor a, Tensor a_scale, Tensor w, Tensor w_scale, Tensor? addend, "
    "Tensor? gain, int block, "
    "float eps, bool norm, str act, bool gate, bool fast_accum, ScalarType dtype, "
    "Tensor? out_scale, "
    "bool save, bool transposed) -> (Tensor y, Tensor yt, Tensor u, Tensor r)",
    "fused_chain_backward(Tensor gy, Tensor u, Tensor r, Tensor? gain, int block, str act, "
    "bool gate, bool rows, ScalarType dtype, bool rows_t, ScalarType dtype_t, "
    "Tensor? cells=None) "
    "-> (Tensor q, Tensor scale, Tensor qt, Tensor scale_t, Tensor ggain)",
)
for _schema in _SCHEMAS:
    LIBRARY.define(_schema)


def round_up(m: int, to: int = 16) -> int:
    """Spelled `to * (...)`, so that divisibility of a symbolic result is known without a guard."""
    if isinstance(m, int) and m % to == 0:
        return m
    return to * ((m + to - 1) // to)


def _outputs(
    a: Tensor, w: Tensor, block: int, dtype: torch.dtype, fp8: bool, save: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, n = a.shape[0], w.shape[0]
    out = E4M3 if fp8 else dtype
    y = a.new_empty((m, n), dtype=out)
    yt = a.new_empty((n, round_up(m)) if transposed else (0,), dtype=out)
    u = a.new_empty((m, n) if save else (0,), dtype=dtype)
    r = a.new_empty((m, bn.count_blocks(n, block)) if save else (0,), dtype=torch.float32)
    return y, yt, u, r


@torch.library.register_fake("loka::fused_chain", lib=LIBRARY)
def _(
    a, a_scale, w, w_scale, addend, gain, block, eps, norm, act, gate, fast, dtype, out_scale,
    save, turned,
):  # fmt: skip
    return _outputs(a, w, block, dtype, out_scale is not None, save, turned)


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
    y, yt, u, r = _outputs(a, w, block, dtype, out_scale is not None, save, transposed)
    left = a.to(torch.float32) * a_scale.reshape(-1, 1)
    right = w.to(torch.float32) * w_scale.reshape(-1, 1)
    _, z = pointwise_ref(left @ right.t(), None, None, addend)
    wide, normal, inverse = epilogue_ref(z, gain, block, eps, act, gate, norm=norm)
    y = wide.to(dtype) if out_scale is None else quantize_static(wide, out_scale, E4M3)
    if save:
        u, r = normal.to(dtype), inverse
    if transposed:
        yt = _turned(y, yt.shape[1])
    return y, yt, u, r


def _turned(q: Tensor, width: int) -> Tensor:
    """(M, N) -> (N, width), zero-filled past M, for FP8 as well: zero is the byte 0."""
    size = q.element_size()
    bits = q.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size])
    out = bits.new_zeros((q.shape[1], width))
    out[:, : q.shape[0]] = bits.t()
    return out.view(q.dtype)


def _fused_chain_cuda(
    a, a_scale, w, w_scale, addend, gain, block, eps, norm, act, gate, fast, dtype, out_scale,
    save, turned,
):  # fmt: skip
    # Imported here: the package must import where Triton is missing.
    from loka_compile.kernels.fused_forward import fused_forward

    out = fused_forward(
        a,
        a_scale,
        w,
        w_scale,
        gain,
        block=block,
        eps=eps,
        act=act,
        gate=gate,
        out_dtype=dtype,
        out_scale=out_scale,
        save_dtype=dtype if save else None,
        transposed=turned,
        norm=norm,
        fast_accum=fast,
        addend=addend,
    )
    none = a.new_empty((0,), dtype=out.y.dtype)
    return (
        out.y,
        none if out.yt is None else out.yt,
        a.new_empty((0,), dtype=dtype) if out.u is None else out.u,
        a.new_empty((0,), dtype=torch.float32) if out.r is None else out.r,
    )


LIBRARY.impl("fused_chain", fused_chain_ref, "CPU")
LIBRARY.impl("fused_chain", _fused_chain_cuda, "CUDA")


@torch.library.register_fake("loka::fused_chain_backward", lib=LIBRARY)
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
    from loka_compile.lowering.formulas import block_norm_act_backward

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
    return first, scale, _turned(second.t(), round_up(gz.shape[0])), scale_t, sums


def _fused_chain_backward_cuda(
    gy, u, r, gain, block, act, gate, rows, dtype, rows_t, dtype_t, cells=None
):
    from loka_compile.kernels.fused_backward import fused_backward

    own = None
    if cells is not None and not rows and not rows_t:
        own = cells.detach()[meters.GRADIENT : meters.GRADIENT + 2]
    return fused_backward(gy, u, r, gain, block, act, gate, rows, dtype, rows_t, dtype_t, cells=own)


LIBRARY.impl("fused_chain_backward", fused_chain_backward_ref, "CPU")
LIBRARY.impl("fused_chain_backward", _fused_chain_backward_cuda, "CUDA")
