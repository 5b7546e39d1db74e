"""One kernel and one read: dL/dy -> dL/dz, in FP8 in both orientations, a scale per 1 x 128 values.

    q  (M, N), scaled along N for dgrad         qt (N, M up to 16), scaled along M for wgrad

A scale of 128 rows or columns is found inside a tile of 128 rows and one block, so nothing is read
to find it beforehand: see `fused_backward` for scales that need it, and for the formulas. A tile is
worked off in four parts, of every fourth row; the gradient waits in registers for the scale of its
columns, and four rows then make one word of qt: bytes are not turned one by one, which costs more
than all the rest.
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
from loka_compile.kernels.fp8 import to_fp8
from loka_compile.kernels.gradient_tile import ACTIVATIONS
from loka_compile.kernels.gradient_tile import gradient_of
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
from loka_compile.kernels.tiles import programs_of

_TRITON = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
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
def _read(
    gy_ptr, u_ptr, r_ptr, rows, columns, inside, tile_n, M, N, blocks, WHOLE: tl.constexpr
):  # fmt: skip
    """dL/dy, u and r of some rows of a block, as they are stored. WHOLE: nothing is masked."""
    # 64-bit offsets: M * N passes 2**31 for real batches.
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    by_row = r_ptr + rows.to(tl.int64) * blocks + tile_n
    if WHOLE:
        gy = tl.load(gy_ptr + at, eviction_policy="evict_first")
        u = tl.load(u_ptr + at, eviction_policy="evict_first")
        r = tl.load(by_row)
    else:
        mask = (rows < M)[:, None] & inside[None, :]
        gy = tl.load(gy_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
        u = tl.load(u_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
        r = tl.load(by_row, mask=rows < M, other=1.0)
    return gy, u, r


@triton.jit
def _larger(a, b):
    """The larger magnitude; NaN where either is."""
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _word(a, b, c, d, like: tl.constexpr, MAX: tl.constexpr, EXACT: tl.constexpr):
    """Four FP32 tiles -> one of int32: FP8 bytes, `a` the lowest."""
    if EXACT:
        word = to_fp8(a, like, MAX, EXACT).to(tl.uint8, bitcast=True).to(tl.int32)
        word |= to_fp8(b, like, MAX, EXACT).to(tl.uint8, bitcast=True).to(tl.int32) << 8
        word |= to_fp8(c, like, MAX, EXACT).to(tl.uint8, bitcast=True).to(tl.int32) << 16
        word |= to_fp8(d, like, MAX, EXACT).to(tl.uint8, bitcast=True).to(tl.int32) << 24
    else:
        # One instruction casts and packs two values; taken apart again they would cost six.
        KIND: tl.constexpr = "e4m3x2" if MAX < 1000.0 else "e5m2x2"
        CODE: tl.constexpr = (
            "{ .reg .b16 lo, hi;"
            " cvt.rn.satfinite." + KIND + ".f32 lo, $2, $1;"
            " cvt.rn.satfinite." + KIND + ".f32 hi, $4, $3;"
            " mov.b32 $0, {lo, hi}; }"
        )
        word = tl.inline_asm_elementwise(
            CODE, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
        )
    return word


@triton.jit
def _blocks_kernel(
    gy_ptr, u_ptr, r_ptr, gain_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, partial_ptr,
    M, M_UP, N, block, blocks, outer, room, outer_t, room_t,
    BN: tl.constexpr, WHOLE: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr,
    GAIN: tl.constexpr, PDL: tl.constexpr, EXACT: tl.constexpr,
    TURNED: tl.constexpr, MAX: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
    LIKE_T: tl.constexpr, TURNED_T: tl.constexpr, MAX_T: tl.constexpr, EXPONENT_T: tl.constexpr,
    MANTISSA_T: tl.constexpr,
):  # fmt: skip
    """qt_ptr: int32, four rows of M a word. WHOLE: M is a multiple of 128, all blocks BN wide."""
    GROUPS: tl.constexpr = BN // 128
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tiles = tl.cdiv(M, 128) * blocks
    local = tl.arange(0, BN)
    quarter = tl.arange(0, 32)
    tile = tl.program_id(0)
    gy, u, r = _read(
        gy_ptr, u_ptr, r_ptr, (tile // blocks) * 128 + quarter * 4, (tile % blocks) * block + local,
        (local < block) & ((tile % blocks) * block + local < N), tile % blocks, M, N, blocks, WHOLE,
    )  # fmt: skip
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile_n = tile % blocks
        tile_m = tile // blocks
        first = tile_n * block
        columns = first + local
        inside = (local < block) & (columns < N)
        width = tl.minimum(block, N - first).to(tl.float32)
        groups = first // 128 + tl.arange(0, GROUPS)
        gain = tl.zeros((BN,), dtype=tl.float32)
        if GAIN:
            gain = tl.load(gain_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        total = tl.zeros((32, BN), dtype=tl.float32)
        held = ()
        for part in tl.static_range(4):
            # Every fourth row: those of one thread then lie side by side in qt.
            rows = tile_m * 128 + quarter * 4 + part
            here_gy, here_u, here_r = gy.to(tl.float32), u.to(tl.float32), r
            # The next rows, of the next tile in the end, are on their way meanwhile.
            if part < 3:
                gy, u, r = _read(
                    gy_ptr, u_ptr, r_ptr, rows + 1, columns, inside, tile_n, M, N, blocks, WHOLE
                )  # fmt: skip
            else:
                after = tl.minimum(tile + tl.num_programs(0), tiles - 1)
                next_n = after % blocks
                far = next_n * block + local
                gy, u, r = _read(
                    gy_ptr, u_ptr, r_ptr, (after // blocks) * 128 + quarter * 4, far,
                    (local < block) & (far < N), next_n, M, N, blocks, WHOLE,
                )  # fmt: skip
            gz, for_gain = gradient_of(here_gy, here_u, here_r, gain, width, ACT, GATE, GAIN)
            mask = (rows < M)[:, None] & inside[None, :]
            if not WHOLE:
                # A NaN row's mean reaches past the block.
                gz = tl.where(mask, gz, 0.0)
            if GAIN:
                total += for_gain
            most = tl.max(tl.reshape(magnitude(gz), (32, GROUPS, 128)), axis=2)
            scale, inverse = power_of_two(most, EXPONENT, MANTISSA)
            _store_scales(
                scale_ptr, scale, rows, groups, M, tl.cdiv(N, 128), outer, room, TURNED
            )  # fmt: skip
            v = tl.reshape(tl.reshape(gz, (32, GROUPS, 128)) * inverse[:, :, None], (32, BN))
            q = to_fp8(v, q_ptr.dtype.element_ty, MAX, EXACT)
            to = q_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
            if WHOLE:
                tl.store(to, q)
            else:
                tl.store(to, q, mask=mask)
            held = held + (gz,)  # type: ignore[assignment]  # noqa: RUF005
        if GAIN:
            # Partial sums, added up outside: atomics would make the result depend on timing.
            sums = tl.sum(total, axis=0)
            tl.store(partial_ptr + tile_m.to(tl.int64) * N + columns, sums, mask=inside)
        top = _larger(_larger(held[0], held[1]), _larger(held[2], held[3]))
        most_t = tl.max(magnitude(top), axis=0)
        scale_t, inverse_t = power_of_two(most_t, EXPONENT_T, MANTISSA_T)
        # The last block also fills up the scales' places.
        lines = tl.where((local < block) | (tile_n == blocks - 1), columns, room_t)
        _store_scales(
            scale_t_ptr, scale_t[:, None], lines, tile_m + tl.arange(0, 1), N, tl.cdiv(M, 128),
            outer_t, room_t, TURNED_T,
        )  # fmt: skip
        by = inverse_t[None, :]
        word = _word(
            held[0] * by, held[1] * by, held[2] * by, held[3] * by, LIKE_T, MAX_T, EXACT
        )  # fmt: skip
        if not WHOLE:
            # Rows past M are zeros, beside a NaN scale too: they fill the tail up to M_UP.
            left = tl.minimum(tl.maximum(M - tile_m * 128 - quarter * 4, 0), 4)
            keep = tl.where(left == 4, -1, (1 << (8 * left)) - 1)
            word &= keep[:, None]
        places = tile_m * 32 + quarter
        to = qt_ptr + columns.to(tl.int64)[:, None] * (M_UP // 4) + places[None, :]
        if WHOLE:
            tl.store(to, tl.trans(word))
        else:
            tl.store(to, tl.trans(word), mask=inside[:, None] & (places < M_UP // 4)[None, :])


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
        straight, turned, u.device, warps,
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
    args = (gy, u, r, by, q, scale, qt.view(torch.int32), scale_t, partial, *how.sizes)
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
    warps: int | None,
) -> _Recipe:
    m, n = shape
    blocks = bn.count_blocks(n, block)
    if straight.kind != "1x128" or turned.kind != "1x128":
        raise ValueError(f"scales {straight.kind}, {turned.kind}: only 1x128 is written here")
    if blocks > 1 and block % GROUP:
        raise ValueError(f"blocks of {block} are no multiple of {GROUP}: groups would cross them")
    m_up, tall = -(-m // 16) * 16, -(-m // GROUP)
    wide = max(triton.next_power_of_2(block), GROUP)
    constants: dict[str, Any] = {
        "BN": wide,
        "WHOLE": m % GROUP == 0 and n % block == 0 and block == wide,
        "ACT": ACTIVATIONS[act],
        "GATE": gate,
        "GAIN": gain_dtype is not None,
        "PDL": overlaps(device),
        "EXACT": device.type != "cuda",
    }
    places = []
    for rule, lines, along, tail in ((straight, m, n, ""), (turned, n, m, "_T")):
        exponent, mantissa = exponent_split(rule.dtype)
        if tail:
            constants["LIKE_T"] = _TRITON[rule.dtype]
        constants |= {
            "TURNED" + tail: rule.turned,
            "MAX" + tail: FP8_MAX[rule.dtype],
            "EXPONENT" + tail: exponent,
            "MANTISSA" + tail: mantissa,
        }
        outer = rule.shape(lines, along)[1]
        places += [outer, outer if rule.turned else lines]
    sizes = (m, m_up, n, block, blocks, *places)
    # What the sums of dL/dgain need beside the tile: fewer threads, with more registers each.
    warps = warps or (16 if gain_dtype is None else 8)
    key = (
        kind(m, m_up, *places),
        (n, block, warps),
        (gy_dtype, u_dtype, gain_dtype, straight.dtype, turned.dtype),
        tuple(constants.values()),
        device.index,
    )
    grid = (min(tall * blocks, programs_of(device)),)
    return _Recipe(m_up, tall, grid, warps, sizes, constants, key)


def fused_backward_blocks_ref(gz: Tensor, straight: Scale, turned: Scale) -> Both:
    """The quantising in plain torch, of dL/dz (M, N) in FP32; see `lowering.formulas` for that."""
    return quantize_both_ref(gz, straight, turned)
