"""Tiles of the fused forward: which one a shape gets, and the counters that a split meets at.

Without tuning a rule decides (`default_config`). A measured choice comes before it, from whoever
keeps such (`measured_by`; `lowering.tile_store` does). Nothing is tuned unasked: a compile per
candidate at start-up would cost more than the tile gains.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from loka_compile.kernels.room import lasting


@dataclass(frozen=True)
class Config:
    """Tile and pipeline of one launch; the tile's N is the block, rounded up to a power of two."""

    block_m: int = 64
    block_k: int = 128
    split_k: int = 1
    warps: int = 4
    stages: int = 4


#: (m, n, k, block, form, device) -> the config that was measured there, if any.
Measured = Callable[[int, int, int, int, str, torch.device], "Config | None"]
_measured: Measured | None = None
#: Dicts of others that hold configs; emptied when the measured ones change.
HOLDERS: list[Any] = []


def measured_by(find: Measured) -> None:
    """From now on `find` is asked before the rule; also called when its answers have changed."""
    global _measured
    _measured = find
    config_for.cache_clear()
    for holder in HOLDERS:
        holder.clear()


def power_of_two(n: int) -> int:
    """The least one that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def programs_of(device: torch.device) -> int:
    """Programs of a persistent grid: the SMs; a few in the interpreter."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.lru_cache(maxsize=4096)
def default_config(m: int, n: int, k: int, block: int, sms: int = 132, form: str = "y") -> Config:
    """A sane config without tuning: fill the SMs, split K where tiles are few.

    What the epilogue holds beside the accumulator must fit the registers, or they spill (read from
    the compiled code): a transposed copy needs 8 warps at 64 x 256, (M, N) operands and scales
    along K, whose steps have an accumulator of their own, 64 rows too.
    """
    wide = power_of_two(block)
    parts = form.split("+")
    # Nearly a wave of large tiles beats a wave and a half of small ones.
    block_m = 128 if -(-m // 128) * -(-n // block) >= 0.9 * sms else 64
    if {"m", "g"} & {*parts} and wide >= 256:
        block_m = 64
    # Values of the accumulator that a thread may hold.
    most = 64 if {"m", "t", "p", "g"} & {*parts} else 128
    warps = 8 if block_m * wide > most * 32 * 4 else 4
    tiles = -(-m // block_m) * -(-n // block)
    split = 1
    while split < 8 and fits(tiles, split * 2, sms) and k // (split * 2) >= 512:
        split *= 2
    deepest = 3 if block_m * wide >= 128 * 256 else 4
    return Config(block_m, 128, split, warps, max(2, min(deepest, -(-k // 128))))


def form_of(
    fp8: bool, saved: bool, transposed: bool, operands: int, norm: bool, groups: bool = False
) -> str:
    """What a launch moves besides its operands: a tile that fits one form may not fit another.

    `y` or `y8`; `+u` for saved tensors, `+t` for the transposed copy, `+m` for (M, N) operands of
    the epilogue or a saved gate, `+p` without a norm, `+g` for scales along K.
    """
    parts = ["y8" if fp8 else "y", *["u"] * saved, *["t"] * transposed, *["m"] * (operands > 0)]
    return "+".join([*parts, *["p"] * (not norm), *["g"] * groups])


def pointwise_block(n: int) -> int:
    """The tile's width where no norm asks for one: at 256 columns the epilogue's operands spill."""
    return min(n, 128)


@functools.lru_cache(maxsize=4096)
def config_for(m: int, n: int, k: int, block: int, form: str, device: torch.device) -> Config:
    """The measured config of this shape's bucket on this device, else the default."""
    sms = programs_of(device)
    held = None
    if device.type == "cuda" and _measured is not None:
        held = _measured(m, n, k, block, form, device)
    if held is not None:
        return resident(held, m, n, block, sms)
    return default_config(m, n, k, block, sms, form)


def whole_tiles(tiles: int, split: int, programs: int) -> int:
    """How many of `tiles` a launch with this split does not split: whole waves of programs, where
    there is one. The others times the split must be at most `programs`; see `fused_kernel`."""
    return 0 if split == 1 or tiles * split <= programs else tiles // programs * programs


def fits(tiles: int, split: int, programs: int) -> bool:
    """The split parts of a launch are resident at once, and there are some."""
    full = whole_tiles(tiles, split, programs)
    return split == 1 or 0 < (tiles - full) * split <= programs


def resident(config: Config, m: int, n: int, block: int, sms: int) -> Config:
    """`config` with a split that is resident at this very M: its bucket may reach below."""
    tiles = -(-m // config.block_m) * -(-n // block)
    split = config.split_k
    while not fits(tiles, split, sms):
        split //= 2
    return replace(config, split_k=split)


#: Shared memory of an SM that programs may share, and of the least that each needs besides.
_SHARED, _RESERVED, _MOST_PER_SM = 227 << 10, 2 << 10, 4


def programs_per_sm(config: Config, wide: int, steps: int) -> int:
    """How many programs of this tile an SM holds at once: one's epilogue then overlaps another's
    product. `steps`: of K; a pipeline is no deeper than that."""
    ring = min(config.stages, max(steps, 1)) * (config.block_m + wide) * config.block_k
    shared = max(ring, config.block_m * wide * 2) + _RESERVED
    # 64K registers: the accumulator and about as much again for a thread's addresses and values.
    registers = config.warps * 32 * (config.block_m * wide // (config.warps * 32) + 80)
    return max(1, min(_SHARED // shared, 65536 // registers, _MOST_PER_SM))


def candidates(m: int, n: int, k: int, block: int, sms: int) -> list[Config]:
    """What may win at a shape: tiles that can fit, splits that stay resident."""
    found = []
    wide = power_of_two(block)
    for block_m in (16, 32, 64, 128):
        tiles = -(-m // block_m) * -(-n // block)
        # Below 64 rows an older product runs, on more SMs: for a short K, or few tiles.
        if block_m < 64 and k > (1024 if tiles <= sms else 256):
            continue
        for split, warps in itertools.product((1, 2, 4, 8, 16), (4, 8)):
            if split > 1 and (k < 256 * split or not fits(tiles, split, sms)):
                continue
            if not 512 * warps <= block_m * wide <= 4096 * warps or split * 4 > block_m:
                continue
            for stages in (2, 3, 4, 5):
                # No deeper than K is long, and shallow ones for a short K alone.
                if stages * (block_m + wide) * 128 > _SHARED - (16 << 10):
                    continue
                if k <= 128 * (stages - 2) or (stages == 2 and k > 512):
                    continue
                found.append(Config(block_m, 128, split, warps, stages))
    return found


_COUNTERS: dict[tuple[torch.device, int, int], Tensor] = {}
#: A split launch has at most as many tiles as the device has SMs.
_MOST_TILES = 1024


def counters_of(device: torch.device, split: int) -> Tensor:
    """Made once per stream and split: a CUDA graph keeps the address, and launches that overlap
    must not count each other's parts."""
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    key = (device, stream, split)
    if key not in _COUNTERS:

        def made() -> Tensor:
            return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)

        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        _COUNTERS[key] = made() if captured else lasting(made, device)
    return _COUNTERS[key]
