"""One kernel and one read: dL/dy -> dL/dz, in FP8 in both orientations, a scale per 1 x 128 values.

    q  (M, N), scaled along N for dgrad         qt (N, M up to 16), scaled along M for wgrad

A scale of 128 rows or columns is found inside a tile of 128 rows and one block, so nothing is read
to find it beforehand: see `fused_backward` for scales that need it, and for the formulas. A tile
is worked off in strips of rows; the gradient waits in bf16 for the scale of its columns, so qt is
made of dL/dz rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents
from triton.language.extra.cuda import gdc_wait

from loka_compile.kernels import block_norm as bn
from loka_compile.kernels.fp8 import magnitude
from loka_compile.kernels.fp8 import power_of_two
from loka_compile.kernels.fp8 import to_bf16
from loka_compile.kernels.fp8 import to_fp8
from loka_compile.kernels.gradient_tile import ACTIVATIONS
from loka_compile.kernels.gradient_tile import gradient_tile
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import Recipes
from loka_compile.kernels.launch import aligned
from loka_compile.kernels.launch import kind
from loka_compile.kernels.launch import overlaps
from loka_compile.kernels.launch import start
from loka_compile.kernels.orientations import Both
from loka_compile.kernels.orientations import Scale
from loka_compile.kernels.orientations import quantize_both_ref
from loka_compile.kernels.quantize import FP8_MAX
from loka_compile.kernels.quantize import exponent_split

#: Values that share a scale, along either dimension.
GROUP = 128


@triton.jit
def _store_scales(
    scale_ptr, scale, lines, groups, LINES, GROUPS, outer, room, TURNED: tl.constexpr
):  # fmt: skip
    """`scale` (lines, groups); turned, those past the last line are zeros up to `room`."""
    there = (groups < GROUPS)[None, :]
    at = lines.to(tl.int64)[:, None]
    real = (lines < LINES)[:, None]
    if TURNED:
        value = tl.where(real, scale, 0.0)
        mask = (lines < room)[:, None] & there
        tl.store(scale_ptr + groups[None, :].to(tl.int64) * outer + at, value, mask=mask)
    else:
        tl.store(scale_ptr + at * outer + groups[None, :], scale, mask=real & there)


@triton.jit
def _blocks_kernel(
    gy_ptr, u_ptr, r_ptr, gain_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, partial_ptr,
    M, M_UP, N, block, blocks, outer, room, outer_t, room_t,
    STRIPS: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr,
    GAIN: tl.constexpr, PDL: tl.constexpr, EXACT: tl.constexpr,
    TURNED: tl.constexpr, MAX: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
    TURNED_T: tl.constexpr, MAX_T: tl.constexpr, EXPONENT_T: tl.constexpr,
    MANTISSA_T: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = BN // 128
    TALL: tl.constexpr = 128 // STRIPS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile_n = tl.program_id(0) % blocks
    tile_m = tl.program_id(0) // blocks
    first = tile_n * block
    local = tl.arange(0, BN)
    columns = first + local
    inside = (local < block) & (columns < N)
    width = tl.minimum(block, N - first).to(tl.float32)
    groups = first // 128 + tl.arange(0, GROUPS)
    top = tl.zeros((BN,), dtype=tl.int32)
    total = tl.zeros((BN,), dtype=tl.float32)
    held = ()
    for strip in tl.static_range(STRIPS):
        rows = tile_m * 128 + strip * TALL + tl.arange(0, TALL)
        mask = (rows < M)[:, None] & inside[None, :]
        gz, for_gain = gradient_tile(
            gy_ptr, u_ptr, r_ptr, gain_ptr, rows, columns, mask, tile_n, M, N, blocks, width, ACT,
            GATE, GAIN, "evict_first",
        )  # fmt: skip
        if GAIN:
            total += tl.sum(for_gain, axis=0)
        grouped = tl.reshape(gz, (TALL, GROUPS, 128))
        bits = tl.max(magnitude(grouped), axis=2)
        scale, inverse = power_of_two(bits, EXPONENT, MANTISSA)
        _store_scales(
            scale_ptr, scale, rows, groups, M, tl.cdiv(N, 128), outer, room, TURNED
        )  # fmt: skip
        v = tl.reshape(grouped * inverse[:, :, None], (TALL, BN))
        q = to_fp8(v, q_ptr.dtype.element_ty, MAX, EXACT)
        # 64-bit offsets: M * N passes 2**31 for real batches.
        tl.store(q_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :], q, mask=mask)
        near = to_bf16(gz, EXACT)
        top = tl.maximum(top, tl.max(magnitude(near), axis=0))
        held = held + (near.to(tl.bfloat16),)  # type: ignore[assignment]  # noqa: RUF005
    if GAIN:
        # Partial sums per tile, added up outside: atomics would make the result depend on timing.
        tl.store(partial_ptr + tile_m.to(tl.int64) * N + columns, total, mask=inside)
    scale_t, inverse_t = power_of_two(top, EXPONENT_T, MANTISSA_T)
    # The last block also fills up the scales' places.
    lines = tl.where((local < block) | (tile_n == blocks - 1), columns, room_t)
    _store_scales(
        scale_t_ptr, scale_t[:, None], lines, tile_m + tl.arange(0, 1), N, tl.cdiv(M, 128),
        outer_t, room_t, TURNED_T,
    )  # fmt: skip
    for strip in tl.static_range(STRIPS):
        rows = tile_m * 128 + strip * TALL + tl.arange(0, TALL)
        # Transposed before it is rounded: Triton 3.6 mixes up the elements of an FP8 tile that is
        # stored both as it lies and transposed.
        t = tl.trans(held[strip]).to(tl.float32) * inverse_t[:, None]
        # Rows past M are zeros, beside a NaN scale too: they fill the tail up to M_UP.
        t = tl.where((rows < M)[None, :], t, 0.0)
        qt = to_fp8(t, qt_ptr.dtype.element_ty, MAX_T, EXACT)
        at = columns.to(tl.int64)[:, None] * M_UP + rows[None, :]
        tl.store(qt_ptr + at, qt, mask=inside[:, None] & (rows < M_UP)[None, :])


_launch = Launcher(_blocks_kernel)


def fused_backward_blocks(
    gy: Tensor,
    u: Tensor,
    r: Tensor,
    gain: Tensor | None,
    block: int,
    act: str,
    gate: bool,
    straight: Scale,
    turned: Scale,
    *,
    strips: int | None = None,
    warps: int | None = None,
) -> tuple[Both, Tensor]:
    """gy, u (M, N), r (M, blocks) FP32, gain (N,) -> q (M, N), qt (N, M rounded up to 16) and their
    scales, dL/dgain as partial sums (ceil(M / 128), N) in FP32 (empty without a gain).

    straight, turned: `1x128` scales of q and of qt, and how they lie. Raises ValueError for another
    kind, and for a block that is no multiple of 128 (of several): its groups would cross blocks.
    """
    gy, u, r = gy.contiguous(), u.contiguous(), r.contiguous()
    signature = (
        u.shape, gy.dtype, u.dtype, None if gain is None else gain.dtype, block, act, gate,
        straight, turned, u.device, strips, warps,
    )  # fmt: skip
    how = RECIPES.get(signature)
    if how is None:
        how = RECIPES[signature] = _recipe(*signature)
    (m, n), device = u.shape, u.device
    q = torch.empty((m, n), dtype=straight.dtype, device=device)
    qt = torch.empty((n, how.m_up), dtype=turned.dtype, device=device)
    scale = torch.empty(straight.shape(m, n), dtype=torch.float32, device=device)
    scale_t = torch.empty(turned.shape(n, m), dtype=torch.float32, device=device)
    both = Both(q, scale, qt, scale_t)
    shape = (how.tall, n) if gain is not None else (0,)
    partial = torch.empty(shape, dtype=torch.float32, device=device)
    if m == 0:
        return both, partial
    by = gain if gain is not None else r
    args = (gy, u, r, by, q, scale, qt, scale_t, partial, *how.sizes)
    even = aligned(gy, u, r, by)
    compiled = how.compiled.get(even)
    if compiled is not None:
        start(compiled, how.grid, args, how.constants.values(), device)
    else:
        key, pdl = (how.key, even), how.constants["PDL"]
        _launch(key, how.grid, args, how.constants, device, num_warps=how.warps, pdl=pdl)
        how.compiled[even] = _launch.compiled(key)
    return both, partial


@dataclass
class _Recipe:
    """All of a launch that follows from shapes, dtypes and switches."""

    m_up: int
    #: Tiles along M.
    tall: int
    grid: tuple[int]
    warps: int
    sizes: tuple[int, ...]
    constants: dict[str, Any]
    key: Hashable
    #: Are all pointers aligned -> the compiled kernel.
    compiled: dict[bool, Any] = field(default_factory=dict)


RECIPES = Recipes()


def _recipe(
    shape: torch.Size,
    gy_dtype: torch.dtype,
    u_dtype: torch.dtype,
    gain_dtype: torch.dtype | None,
    block: int,
    act: str,
    gate: bool,
    straight: Scale,
    turned: Scale,
    device: torch.device,
    strips: int | None,
    warps: int | None,
) -> _Recipe:
    m, n = shape
    blocks = bn.count_blocks(n, block)
    if straight.kind != "1x128" or turned.kind != "1x128":
        raise ValueError(f"scales {straight.kind}, {turned.kind}: only 1x128 is written here")
    if blocks > 1 and block % GROUP:
        raise ValueError(f"blocks of {block} are no multiple of {GROUP}: groups would cross them")
    m_up, tall = -(-m // 16) * 16, -(-m // GROUP)
    constants: dict[str, Any] = {
        # As few as the registers hold (read from the compiled code).
        "STRIPS": strips or (2 if gain_dtype is None else 1),
        "BN": max(triton.next_power_of_2(block), GROUP),
        "ACT": ACTIVATIONS[act],
        "GATE": gate,
        "GAIN": gain_dtype is not None,
        "PDL": overlaps(device),
        "EXACT": device.type != "cuda",
    }
    places = []
    for rule, lines, along, tail in ((straight, m, n, ""), (turned, n, m, "_T")):
        exponent, mantissa = exponent_split(rule.dtype)
        constants |= {
            "TURNED" + tail: rule.turned,
            "MAX" + tail: FP8_MAX[rule.dtype],
            "EXPONENT" + tail: exponent,
            "MANTISSA" + tail: mantissa,
        }
        outer = rule.shape(lines, along)[1]
        places += [outer, outer if rule.turned else lines]
    sizes = (m, m_up, n, block, blocks, *places)
    warps = warps or 16
    key = (
        kind(m, m_up, *places),
        (n, block, warps),
        (gy_dtype, u_dtype, gain_dtype, straight.dtype, turned.dtype),
        tuple(constants.values()),
        device.index,
    )
    return _Recipe(m_up, tall, (tall * blocks,), warps, sizes, constants, key)


def fused_backward_blocks_ref(gz: Tensor, straight: Scale, turned: Scale) -> Both:
    """The quantising in plain torch, of dL/dz (M, N) in FP32; see `lowering.formulas` for that."""
    first = quantize_both_ref(gz, straight, None)
    second = quantize_both_ref(gz, None, turned, dtype=torch.bfloat16)
    return Both(first.q, first.scale, second.qt, second.scale_t)
