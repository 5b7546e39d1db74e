"""What observers want of a fused chain and nobody writes, in one launch each.

    activated   u -> act(gain * u): the chain's result, where it is handed over as e4m3
    gradient    dL/dy -> dL/dz through activation and BlockNorm (`gradient_tile.py`), unquantised

The definitions are `activated` and `block_norm_act_backward` of `lowering.chain_formulas`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka_compile.kernels import block_norm as bn
from loka_compile.kernels.call import Call
from loka_compile.kernels.gradient_tile import ACTIVATIONS
from loka_compile.kernels.gradient_tile import gradient_tile
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import Recipes
from loka_compile.kernels.launch import kind
from loka_compile.kernels.pairs import spelt_out
from loka_compile.kernels.room import Room
from loka_compile.kernels.room import allocator
from loka_compile.kernels.room import dense

#: Values of a tile of `gradient`, and of `activated`.
_TILE, _FLAT = 4096, 8192


@triton.jit
def _activated_kernel(
    u, gain, y, M, N, ACT: tl.constexpr, GAIN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    at = rows[:, None] * N + columns[None, :]
    v = tl.load(u + at, mask=mask, other=0.0).to(tl.float32)
    if GAIN:
        v = v * tl.load(gain + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if ACT == 1:
        # A NaN stays one: `maximum` alone would take the number.
        v = tl.where(v != v, v, v * (tl.minimum(tl.maximum(v + 3.0, 0.0), 6.0) * (1.0 / 6.0)))
    tl.store(y + at, v.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _gradient_kernel(
    gy, u, r, gain, gz, M, N, block, blocks, ACT: tl.constexpr, GATE: tl.constexpr,
    GAIN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    tile_n = tl.program_id(1)
    first = tile_n * block
    local = tl.arange(0, BN)
    columns = first + local
    inside = (local < block) & (columns < N)
    width = tl.minimum(block, N - first).to(tl.float32)
    mask = (rows < M)[:, None] & inside[None, :]
    found, _ = gradient_tile(
        gy, u, r, gain, rows, columns, mask, tile_n, M, N, blocks, width, ACT, GATE, GAIN,
        False, EXACT,
    )  # fmt: skip
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(gz + at, found.to(gz.dtype.element_ty), mask=mask)


def activated(u: Tensor, gain: Tensor | None, act: str) -> Tensor:
    """u (M, N), gain (N,) or None, act "none" or "hard_swish" -> (M, N) in u's dtype."""
    u = u.contiguous()
    of_gain = None if gain is None else gain.dtype
    signature = ("activated", u.shape, u.dtype, of_gain, act, u.device)
    how = RECIPES.get(signature)
    if how is None:
        how = RECIPES[signature] = _activated_recipe(*signature[1:])
    room, call = how
    y = allocator(u.device)(*room)
    if y.numel():
        _start(call, (u, u if gain is None else gain, y))
    return y


def gradient(
    gy: Tensor, u: Tensor, r: Tensor, gain: Tensor | None, block: int, act: str, gate: bool
) -> Tensor:
    """gy, u (M, N), r (M, blocks) FP32, gain (N,) or None -> dL/dz (M, N) in gy's dtype."""
    gy, u, r = gy.contiguous(), u.contiguous(), r.contiguous()
    of_gain = None if gain is None else gain.dtype
    signature = (u.shape, gy.dtype, u.dtype, of_gain, block, act, gate, u.device)
    how = RECIPES.get(signature)
    if how is None:
        how = RECIPES[signature] = _gradient_recipe(*signature)
    room, call = how
    gz = allocator(u.device)(*room)
    if gz.numel():
        _start(call, (gy, u, r, r if gain is None else gain, gz))
    return gz


def _start(call: Call, tensors: tuple[Tensor, ...]) -> None:
    if not call.start([t.data_ptr() for t in tensors]):
        call.run(tuple([t.detach() for t in tensors]))


_activated = Launcher(_activated_kernel)
_gradient = Launcher(_gradient_kernel)


def _activated_recipe(
    shape: torch.Size,
    dtype: torch.dtype,
    gain: torch.dtype | None,
    act: str,
    device: torch.device,
) -> tuple[Room, Call]:
    m, n = shape
    wide = min(1024, triton.next_power_of_2(max(n, 1)))
    constants: dict[str, Any] = {
        "ACT": ACTIVATIONS[act], "GAIN": gain is not None, "BM": _FLAT // wide, "BN": wide,
    }  # fmt: skip
    grid = (triton.cdiv(m, _FLAT // wide), triton.cdiv(n, wide))
    key = (kind(m, n), tuple(constants.values()), dtype, gain, device.index)
    call = Call(_activated, grid, (m, n), constants, key, device, num_warps=8)
    return dense((m, n), dtype), call


def _gradient_recipe(
    shape: torch.Size,
    gy: torch.dtype,
    u: torch.dtype,
    gain: torch.dtype | None,
    block: int,
    act: str,
    gate: bool,
    device: torch.device,
) -> tuple[Room, Call]:
    (m, n), blocks = shape, bn.count_blocks(shape[1], block)
    wide = max(triton.next_power_of_2(block), 16)
    rows = max(1, min(32, _TILE // wide))
    constants: dict[str, Any] = {
        "ACT": ACTIVATIONS[act], "GATE": gate, "GAIN": gain is not None, "BM": rows, "BN": wide,
        "EXACT": spelt_out(device),
    }  # fmt: skip
    sizes = (m, n, block, blocks)
    key = (kind(*sizes), tuple(constants.values()), gy, u, gain, device.index)
    grid = (triton.cdiv(m, rows), blocks)
    call = Call(_gradient, grid, sizes, constants, key, device, num_warps=8)
    return dense((m, n), gy), call


RECIPES = Recipes()
