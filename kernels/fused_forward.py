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

from loka_compile.kernels.epilogue import epilogue_ref
from loka_compile.kernels.epilogue import pointwise_ref
from loka_compile.kernels.fused_kernel import fused_kernel
from loka_compile.kernels.fused_recipe import recipe_of
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import Recipes
from loka_compile.kernels.quantize_blockwise import spread_blocks
from loka_compile.kernels.quantize_blockwise import spread_groups
from loka_compile.kernels.room import allocator
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
    made = forward(
        a, a_scale, w, w_scale, gain, bias, mul, addend, out_scale, block, eps, act, gate,
        out_dtype, save_dtype, transposed, norm, fast_accum, groups, config,
    )  # fmt: skip
    return FusedOutput(*made)


def forward(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    mul: Tensor | None,
    addend: Tensor | None,
    out_scale: Tensor | None,
    block: int,
    eps: float,
    act: str,
    gate: bool,
    out_dtype: torch.dtype,
    save_dtype: torch.dtype | None,
    transposed: bool,
    norm: bool,
    fast_accum: bool,
    groups: bool,
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """`fused_forward` by place -> y, yt, u, r: every step calls this for every layer, so all that
    does not hang on addresses is worked out once for what the signature tells apart."""
    signature = (
        a.shape, a.stride(), a.get_device(), w.shape, w.stride(), w.get_device(),
        a_scale.shape, a_scale.get_device(), w_scale.shape, w_scale.get_device(),
        None if gain is None else (gain.dtype, gain.get_device()),
        None if bias is None else (bias.dtype, bias.get_device()),
        None if mul is None else (mul.dtype, mul.dim(), mul.get_device()),
        None if addend is None else (addend.dtype, addend.dim(), addend.get_device()),
        None if out_scale is None else out_scale.get_device(),
        block, eps, act, gate, out_dtype, save_dtype, transposed, norm, fast_accum, config,
        (a_scale.stride(), w_scale.stride()) if groups else None,
    )  # fmt: skip
    how = RECIPES.get(signature)
    if how is None:
        how = RECIPES[signature] = recipe_of(
            _launch, a.shape, w.shape, block, eps, act, gate, norm, fast_accum, transposed,
            out_dtype, save_dtype, out_scale is None, _scales(a_scale, groups),
            _scales(w_scale, groups), _form(gain), _form(bias), _form(mul), _form(addend),
            a.device, config,
        )  # fmt: skip
    make = allocator(how.device)
    y = make(*how.y)
    u = None if how.u is None else make(*how.u)
    r = None if how.r is None else make(*how.r)
    yt = None if how.yt is None else make(*how.yt)
    if a.shape[0] == 0:
        return y, yt, u, r
    partial = counters = y
    if how.partial is not None:
        partial, counters = make(*how.partial), counters_of(how.device, how.split)
    tensors = (
        y,
        y if yt is None else yt,
        y if u is None else u,
        y if r is None else r,
        a_scale,
        w_scale,
        w_scale if bias is None else bias,
        w_scale if mul is None else mul,
        w_scale if addend is None else addend,
        w_scale if gain is None else gain,
        w_scale if out_scale is None else out_scale,
        partial,
        counters,
    )
    call, box_a, box_w = how.call, how.box_a, how.box_w
    places = ((a.data_ptr(), box_a), (w.data_ptr(), box_w))
    if not call.start([t.data_ptr() for t in tensors], places):
        call.run(tensors, ((a, box_a), (w, box_w)))
    return y, yt, u, r


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
