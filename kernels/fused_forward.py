"""One kernel: FP8 GEMM -> scales -> pointwise -> BlockNorm -> activation -> bf16, fp32 or e4m3.

    t = (a * a_scale) @ (w * w_scale).T + bias   p = t * mul + addend
    u = p * r,  r = rsqrt(mean_block(p**2) + eps)
    y = act(gain * u)      or, with `gate`,      y = p * act(gain * u)

Each part but the product may be left out: a plain `act(linear(x))`, a residual or an ensemble's
weighted sum, DCN-V2's `x0 * linear(x) + x`, a norm behind a residual are forms of it.

The Triton code is in `fused_kernel`, tiles and their choice in `tiles`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from loka_compile.kernels import block_norm as bn
from loka_compile.kernels.epilogue import epilogue_ref
from loka_compile.kernels.epilogue import pointwise_ref
from loka_compile.kernels.fused_kernel import ACTIVATIONS
from loka_compile.kernels.fused_kernel import fused_kernel
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import aligned
from loka_compile.kernels.launch import kind
from loka_compile.kernels.tiles import Config
from loka_compile.kernels.tiles import config_for
from loka_compile.kernels.tiles import counters_of
from loka_compile.kernels.tiles import programs_of


@dataclass(frozen=True)
class FusedOutput:
    """y (M, N), e4m3 when an `out_scale` was given; yt (N, M rounded up to 16) its transposed
    copy, zero-filled; u (M, N) and r (M, blocks) when saved (without a norm t and None)."""

    y: Tensor
    yt: Tensor | None
    u: Tensor | None
    r: Tensor | None


_launch = Launcher(fused_kernel)


def fused_forward(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    gain: Tensor | None = None,
    *,
    block: int,
    eps: float = 1e-6,
    act: str = "hard_swish",
    gate: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    out_scale: Tensor | None = None,
    save_dtype: torch.dtype | None = None,
    transposed: bool = False,
    norm: bool = True,
    fast_accum: bool = True,
    bias: Tensor | None = None,
    mul: Tensor | None = None,
    addend: Tensor | None = None,
    config: Config | None = None,
) -> FusedOutput:
    """a (M, K), w (N, K) e4m3, K a multiple of 16 -> y (M, N).

    a_scale, w_scale: FP32 multipliers, () for the tensor or one per row ((M,) or (M, 1); (N,) or
    (N, 1)). out_scale: FP32 scale of an e4m3 y, e.g. sqrt(block) * max|gain| / 448. save_dtype:
    also return u in it and r (M, blocks) FP32; without a norm, t in it. transposed: also return
    y.T, which wgrad reads. norm=False leaves BlockNorm out. bias (N,); mul (M, N) or one scalar ();
    addend (M, N): any floating dtypes, dense. Error against FP64 on the same FP8 operands: the
    rounding of y's dtype; of the accumulation with fast_accum (13 fraction bits on Hopper).
    """
    (m, k), n = a.shape, w.shape[0]
    blocks = bn.count_blocks(n, block)
    if config is None:
        operands = addend is not None or (mul is not None and mul.dim() > 0)
        saved = save_dtype is not None
        config = config_for(
            m, n, k, block, a.device, out_scale is not None, saved, transposed, operands, norm
        )
    interpreted = a.device.type != "cuda"
    programs = programs_of(a.device)
    wide = max(triton.next_power_of_2(block), 16)
    tiles = -(-m // config.block_m) * blocks
    if config.split_k > 1 and not interpreted and tiles * config.split_k > programs:
        raise ValueError(
            f"split_k={config.split_k} with {tiles} tiles needs more programs than the {programs} "
            "that are resident at once; take a smaller split"
        )
    dtype = torch.float8_e4m3fn if out_scale is not None else out_dtype
    y = torch.empty((m, n), dtype=dtype, device=a.device)
    u = r = None
    if save_dtype is not None:
        u = torch.empty((m, n), dtype=save_dtype, device=a.device)
        if norm:
            r = torch.empty((m, blocks), dtype=torch.float32, device=a.device)
    m_up = -(-m // 16) * 16
    yt = torch.empty((n, m_up), dtype=dtype, device=a.device) if transposed else None
    if m == 0:
        return FusedOutput(y, yt, u, r)
    partial = counters = y
    if config.split_k > 1:
        size = tiles * config.split_k * config.block_m * wide
        partial = torch.empty(size, dtype=torch.float32, device=a.device)
        counters = counters_of(a.device, config.split_k)
    grid = min(programs, tiles * config.split_k)
    args = (
        TensorDescriptor.from_tensor(a, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(w, [wide, config.block_k]),
        y,
        yt if yt is not None else y,
        u if u is not None else y,
        r if r is not None else y,
        a_scale,
        w_scale,
        w_scale if bias is None else bias,
        w_scale if mul is None else mul,
        w_scale if addend is None else addend,
        gain if gain is not None else w_scale,
        out_scale if out_scale is not None else w_scale,
        partial,
        counters,
        m,
        m_up,
        n,
        k,
        block,
        blocks,
        float(eps),
    )
    constants = {
        "BM": config.block_m,
        "BN": wide,
        "BK": config.block_k,
        "SPLIT_K": config.split_k,
        "WAIT": not interpreted,
        "IMPRECISE": fast_accum,
        "A_ROWS": a_scale.numel() > 1,
        "W_ROWS": w_scale.numel() > 1,
        "BIAS": bias is not None,
        "MUL": 0 if mul is None else 1 if mul.dim() else 2,
        "ADD": addend is not None,
        "NORM": norm,
        "GAIN": gain is not None,
        "ACT": ACTIVATIONS[act],
        "GATE": gate,
        "SAVE": 0 if save_dtype is None else 1 if norm else 2,
        "FP8": out_scale is not None,
        "TRANSPOSE": transposed,
    }
    # Sizes of the layer are settled by it; of those that follow the batch, their kind.
    key = (
        config,
        kind(m, m_up),
        (n, k, block),
        tuple(None if t is None else t.dtype for t in (y, u, gain, bias, mul, addend)),
        tuple(constants.values()),
        aligned(a_scale, w_scale, gain, out_scale, bias, mul, addend),
        a.device.index,
    )
    _launch(
        key,
        (grid,),
        args,
        constants,
        a.device,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return FusedOutput(y, yt, u, r)


def fused_forward_ref(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    gain: Tensor | None = None,
    *,
    block: int,
    eps: float = 1e-6,
    act: str = "hard_swish",
    gate: bool = False,
    norm: bool = True,
    bias: Tensor | None = None,
    mul: Tensor | None = None,
    addend: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, u, r) in FP64 from the same FP8 operands: the definition. Without a norm, u is t."""
    left = a.double() * a_scale.double().reshape(-1, 1)
    right = w.double() * w_scale.double().reshape(-1, 1)
    t, p = pointwise_ref(left @ right.t(), bias, mul, addend)
    y, u, r = epilogue_ref(p, gain, block, eps, act, gate, norm=norm)
    return y, (u if norm else t), r
