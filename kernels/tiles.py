"""Tiles of the fused forward: which one a shape gets, and the counters that a split meets at.

Without tuning a rule decides (`default_config`). A measured choice comes before it: the user's own
row, else one shipped for the device (`tile_store`). Nothing is tuned unasked: a compile per
candidate at start-up would cost more than the tile gains. `benchmarks/tune_tiles.py` fills both.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from dataclasses import replace

import torch
import triton
from torch import Tensor


@dataclass(frozen=True)
class Config:
    """Tile and pipeline of one launch; the tile's N is the block, rounded up to a power of two."""

    block_m: int = 64
    block_k: int = 128
    split_k: int = 1
    warps: int = 4
    stages: int = 4


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
    the compiled code): a transposed copy needs 8 warps at 64 x 256, (M, N) operands 64 rows too.
    """
    wide = triton.next_power_of_2(block)
    parts = form.split("+")
    block_m = 128 if -(-m // 128) * -(-n // block) >= sms else 64
    if "m" in parts and wide >= 256:
        block_m = 64
    # Values of the accumulator that a thread may hold.
    most = 64 if {"m", "t", "p"} & {*parts} else 128
    warps = 8 if block_m * wide > most * 32 * 4 else 4
    tiles = -(-m // block_m) * -(-n // block)
    split = 1
    while split < 8 and tiles * split * 2 <= sms and k // (split * 2) >= 512:
        split *= 2
    return Config(block_m, 128, split, warps, 3 if block_m * wide >= 128 * 256 else 4)


def form_of(fp8: bool, saved: bool, transposed: bool, operands: int, norm: bool) -> str:
    """What a launch moves besides its operands: a tile that fits one form may not fit another.

    `y` or `y8`; `+u` for saved tensors, `+t` for the transposed copy, `+m` for (M, N) operands of
    the epilogue, `+p` without a norm.
    """
    parts = ["y8" if fp8 else "y", *["u"] * saved, *["t"] * transposed, *["m"] * (operands > 0)]
    return "+".join([*parts, *["p"] * (not norm)])


def pointwise_block(n: int) -> int:
    """The tile's width where no norm asks for one: at 256 columns the epilogue's operands spill."""
    return min(n, 128)


@functools.lru_cache(maxsize=4096)
def config_for(m: int, n: int, k: int, block: int, form: str, device: torch.device) -> Config:
    """The measured config of this shape's bucket on this device, else the default."""
    sms = programs_of(device)
    if device.type == "cuda":
        from loka_compile.kernels.tile_store import find

        held = find(m, n, k, block, form, device)
        if held is not None:
            return resident(held, m, n, block, sms)
    return default_config(m, n, k, block, sms, form)


def resident(config: Config, m: int, n: int, block: int, sms: int) -> Config:
    """`config` with a split that is resident at this very M: its bucket may reach below."""
    tiles = -(-m // config.block_m) * -(-n // block)
    split = config.split_k
    while split > 1 and tiles * split > sms:
        split //= 2
    return replace(config, split_k=split)


def candidates(m: int, n: int, k: int, block: int, sms: int) -> list[Config]:
    """What may win at a shape: tiles that can fit, splits that stay resident."""
    found = []
    for block_m in (64, 128):
        tiles = -(-m // block_m) * -(-n // block)
        for split in (1, 2, 4, 8):
            if split > 1 and (tiles * split > sms or k < 256 * split):
                continue
            for warps in (4, 8):
                if block_m == 128 and warps == 4:
                    continue
                for stages in (3, 4):
                    if block_m == 128 and stages == 4 and block == 256:
                        continue
                    found.append(Config(block_m, 128, split, warps, stages))
    return found


_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}
#: A split launch has at most as many tiles as the device has SMs.
_MOST_TILES = 1024


def counters_of(device: torch.device, split: int) -> Tensor:
    """Made once per device and split: a CUDA graph keeps the address."""
    key = (device, split)
    if key not in _COUNTERS:
        _COUNTERS[key] = torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)
    return _COUNTERS[key]
