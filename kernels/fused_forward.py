"""One kernel: FP8 GEMM -> scales -> pointwise -> BlockNorm -> activation -> bf16, fp32 or e4m3.

    t = (a * a_scale) @ (w * w_scale).T + bias   p = t * mul + addend
    u = p * r,  r = rsqrt(mean_block(p**2) + eps)
    y = act(gain * u)      or, with `gate`,      y = p * act(gain * u)

Each part but the product may be left out: a plain `act(linear(x))`, a residual or an ensemble's
weighted sum, DCN-V2's `x0 * linear(x) + x`, a norm behind a residual are forms of it.

The Triton code is in `fused_tile` and `fused_kernel`, tiles and their choice in `tiles`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from loka_compile.kernels.epilogue import epilogue_ref
from loka_compile.kernels.epilogue import pointwise_ref
from loka_compile.kernels.fused_kernel import fused_kernel
from loka_compile.kernels.fused_recipe import recipe_of
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import Recipes
from loka_compile.kernels.launch import aligned
from loka_compile.kernels.launch import empty
from loka_compile.kernels.launch import start
from loka_compile.kernels.quantize_blockwise import spread_blocks
from loka_compile.kernels.quantize_blockwise import spread_groups
from loka_compile.kernels.tiles import HOLDERS
from loka_compile.kernels.tiles import Config
from loka_compile.kernels.tiles import counters_of


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
    groups: bool = False,
    bias: Tensor | None = None,
    mul: Tensor | None = None,
    addend: Tensor | None = None,
    config: Config | None = None,
) -> FusedOutput:
    """a (M, K), w (N, K) e4m3, K a multiple of 16 -> y (M, N).

    a_scale, w_scale: FP32 multipliers, () for the tensor or one per row ((M,) or (M, 1); (N,) or
    (N, 1)); with `groups` one per 1 x 128 values of a and per 128 x 128 of w, (M, ceil(K / 128))
    and (ceil(N / 128), ceil(K / 128)) of any strides: sums of 128 are then added up in FP32.
    out_scale: FP32 scale of an e4m3 y, e.g. sqrt(block) * max|gain| / 448. save_dtype: also return
    u in it and r (M, blocks) FP32; without a norm, t in it. transposed: also return y.T, which
    wgrad reads. norm=False leaves BlockNorm out. bias (N,); mul (M, N) or one scalar (); addend
    (M, N): any floating dtypes, dense. Error against FP64 on the same FP8 operands: the rounding of
    y's dtype, twice where K is split; of the accumulation with fast_accum (13 fraction bits on
    Hopper). Raises ValueError for a `config` whose split is not resident, or that does not go with
    `groups`.
    """
    signature = (
        a.shape, w.shape[0], block, act, gate, norm, fast_accum, transposed, out_dtype, save_dtype,
        out_scale is None, _scales(a_scale, groups), _scales(w_scale, groups), _form(gain),
        _form(bias), _form(mul), _form(addend), a.device, config,
    )  # fmt: skip
    how = RECIPES.get(signature)
    if how is None:
        how = RECIPES[signature] = recipe_of(*signature)
    (m, _), n, device = a.shape, w.shape[0], a.device
    y = empty((m, n), how.dtype, device)
    u = r = yt = None
    if save_dtype is not None:
        u = empty((m, n), save_dtype, device)
        if norm:
            r = empty((m, how.blocks), torch.float32, device)
    if transposed:
        yt = empty((n, how.m_up), how.dtype, device)
    if m == 0:
        return FusedOutput(y, yt, u, r)
    partial = counters = y
    if how.partial:
        partial = empty((how.partial,), how.partial_dtype, device)
        counters = counters_of(device, how.config.split_k)
    args = (
        TensorDescriptor.from_tensor(a, how.box_a),
        TensorDescriptor.from_tensor(w, how.box_w),
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
        *how.sizes,
        float(eps),
    )
    even = aligned(a_scale, w_scale, gain, out_scale, bias, mul, addend)
    compiled = how.compiled.get(even)
    if compiled is not None:
        start(compiled, how.grid, args, how.constants.values(), device)
        return FusedOutput(y, yt, u, r)
    config, key = how.config, (how.key, even)
    _launch(
        key, how.grid, args, how.constants, device, num_warps=config.warps,
        num_stages=config.stages, pdl=how.constants["PDL"],
    )  # fmt: skip
    how.compiled[even] = _launch.compiled(key)
    return FusedOutput(y, yt, u, r)


def _scales(scale: Tensor, groups: bool) -> tuple[int, ...]:
    """() for one scale, (1,) for one per row, else the strides of many along K."""
    return scale.stride() if groups else (1,) * (scale.numel() > 1)


def _form(t: Tensor | None) -> tuple[torch.dtype, int] | None:
    return None if t is None else (t.dtype, t.dim())


RECIPES = Recipes()
HOLDERS.append(RECIPES)


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
    groups: bool = False,
    bias: Tensor | None = None,
    mul: Tensor | None = None,
    addend: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, u, r) in FP64 from the same FP8 operands: the definition. Without a norm, u is t."""
    if groups:
        a_scale = spread_groups(a_scale, a.shape[1])
        w_scale = spread_blocks(w_scale, *w.shape)
    else:
        a_scale, w_scale = a_scale.reshape(-1, 1), w_scale.reshape(-1, 1)
    left, right = a.double() * a_scale.double(), w.double() * w_scale.double()
    t, p = pointwise_ref(left @ right.t(), bias, mul, addend)
    y, u, r = epilogue_ref(p, gain, block, eps, act, gate, norm=norm)
    return y, (u if norm else t), r
