"""One kernel: FP8 GEMM -> scales -> pointwise -> BlockNorm -> activation -> bf16, fp32 or e4m3.

    t = (a * a_scale) @ (w * w_scale).T + bias   p = t * mul + addend
    u = p * r,  r = rsqrt(mean_block(p**2) + eps)
    y = act(gain * u)      or, with `gate`,      y = p * act(gain * u)

Each part but the product may be left out: a plain `act(linear(x))`, a residual or an ensemble's
weighted sum, DCN-V2's `x0 * linear(x) + x`, a norm behind a residual are forms of it.

The Triton code is in `fused_kernel`, tiles and their choice in `tiles`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from dataclasses import field
from typing import Any

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
from loka_compile.kernels.launch import Recipes
from loka_compile.kernels.launch import aligned
from loka_compile.kernels.launch import kind
from loka_compile.kernels.launch import overlaps
from loka_compile.kernels.launch import start
from loka_compile.kernels.tiles import HOLDERS
from loka_compile.kernels.tiles import Config
from loka_compile.kernels.tiles import config_for
from loka_compile.kernels.tiles import counters_of
from loka_compile.kernels.tiles import fits
from loka_compile.kernels.tiles import form_of
from loka_compile.kernels.tiles import programs_of
from loka_compile.kernels.tiles import programs_per_sm
from loka_compile.kernels.tiles import whole_tiles


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
    signature = (
        a.shape, w.shape[0], block, act, gate, norm, fast_accum, transposed, out_dtype, save_dtype,
        out_scale is None, a_scale.numel() > 1, w_scale.numel() > 1, _form(gain), _form(bias),
        _form(mul), _form(addend), a.device, config,
    )  # fmt: skip
    how = RECIPES.get(signature)
    if how is None:
        how = RECIPES[signature] = _recipe(*signature)
    (m, _), n, device = a.shape, w.shape[0], a.device
    y = torch.empty((m, n), dtype=how.dtype, device=device)
    u = r = yt = None
    if save_dtype is not None:
        u = torch.empty((m, n), dtype=save_dtype, device=device)
        if norm:
            r = torch.empty((m, how.blocks), dtype=torch.float32, device=device)
    if transposed:
        yt = torch.empty((n, how.m_up), dtype=how.dtype, device=device)
    if m == 0:
        return FusedOutput(y, yt, u, r)
    partial = counters = y
    if how.partial:
        partial = torch.empty(how.partial, dtype=how.partial_dtype, device=device)
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


def _form(t: Tensor | None) -> tuple[torch.dtype, int] | None:
    return None if t is None else (t.dtype, t.dim())


@dataclass
class _Recipe:
    """All of a launch that follows from shapes, dtypes and switches."""

    config: Config
    dtype: torch.dtype
    blocks: int
    m_up: int
    #: Elements of the workspace of a split; 0 without.
    partial: int
    partial_dtype: torch.dtype
    box_a: list[int]
    box_w: list[int]
    grid: tuple[int]
    sizes: tuple[int, ...]
    constants: dict[str, Any]
    key: Hashable
    #: Are all pointers aligned -> the compiled kernel.
    compiled: dict[bool, Any] = field(default_factory=dict)


RECIPES = Recipes()
HOLDERS.append(RECIPES)


def _recipe(
    shape: torch.Size,
    n: int,
    block: int,
    act: str,
    gate: bool,
    norm: bool,
    fast_accum: bool,
    transposed: bool,
    out_dtype: torch.dtype,
    save_dtype: torch.dtype | None,
    wide_out: bool,
    a_rows: bool,
    w_rows: bool,
    gain: tuple[torch.dtype, int] | None,
    bias: tuple[torch.dtype, int] | None,
    mul: tuple[torch.dtype, int] | None,
    addend: tuple[torch.dtype, int] | None,
    device: torch.device,
    config: Config | None,
) -> _Recipe:
    m, k = shape
    blocks = bn.count_blocks(n, block)
    if config is None:
        operands = sum(form is not None and form[1] > 1 for form in (mul, addend))
        form = form_of(not wide_out, save_dtype is not None, transposed, operands, norm)
        config = config_for(m, n, k, block, form, device)
    interpreted = device.type != "cuda"
    programs = programs_of(device)
    wide = max(triton.next_power_of_2(block), 16)
    tiles = -(-m // config.block_m) * blocks
    steps = -(-k // config.block_k)
    full = whole_tiles(tiles, config.split_k, programs)
    if not interpreted and not fits(tiles, config.split_k, programs):
        raise ValueError(
            f"split_k={config.split_k} with {tiles} tiles needs more programs than the {programs} "
            "that are resident at once; take a smaller split"
        )
    m_up = -(-m // 16) * 16
    dtype = out_dtype if wide_out else torch.float8_e4m3fn
    constants = {
        "BM": config.block_m,
        "BN": wide,
        "BK": config.block_k,
        "SPLIT_K": config.split_k,
        "TAIL": full > 0,
        "DEVICE": not interpreted,
        "PDL": overlaps(device),
        "FLATTEN": False,
        "IMPRECISE": fast_accum,
        # A gate that is saved keeps more alive; what masks cost in work they save in registers.
        "WHOLE": n % block == 0 and block == wide and not (gate and save_dtype is not None),
        "A_ROWS": a_rows,
        "W_ROWS": w_rows,
        "BIAS": bias is not None,
        "MUL": 0 if mul is None else 1 if mul[1] else 2,
        "ADD": addend is not None,
        "NORM": norm,
        "GAIN": gain is not None,
        "ACT": ACTIVATIONS[act],
        "GATE": gate,
        "SAVE": 0 if save_dtype is None else 1 if norm else 2,
        "FP8": not wide_out,
        "TRANSPOSE": transposed,
    }
    # Partial sums are as wide as what is made of them: half the traffic, and an error of one more
    # rounding of the result.
    wide_results = torch.float32 in (dtype, save_dtype)
    partial_dtype = torch.float32 if wide_results else torch.bfloat16
    # Sizes of the layer are settled by it; of those that follow the batch, their kind.
    key = (
        config,
        kind(m, m_up, full),
        (n, k, block),
        dtype,
        save_dtype,
        tuple(None if one is None else one[0] for one in (gain, bias, mul, addend)),
        tuple(constants.values()),
        device.index,
    )
    split_tiles = (tiles - full) * config.split_k if config.split_k > 1 else 0
    places = programs
    if config.split_k == 1 and not interpreted:
        places *= programs_per_sm(config, wide, steps)
    return _Recipe(
        config,
        dtype,
        blocks,
        m_up,
        split_tiles * config.block_m * wide,
        partial_dtype,
        [config.block_m, config.block_k],
        [wide, config.block_k],
        (min(places, split_tiles + (full if split_tiles else tiles)),),
        (m, m_up, full, n, k, block, blocks),
        constants,
        key,
    )


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
