"""All of a fused forward's launch that follows from shapes, dtypes and switches, not addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from loka_compile.kernels import block_norm as bn
from loka_compile.kernels.call import Box
from loka_compile.kernels.call import Call
from loka_compile.kernels.fused_tile import ACTIVATIONS
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import kind
from loka_compile.kernels.launch import overlaps
from loka_compile.kernels.room import Room
from loka_compile.kernels.room import dense
from loka_compile.kernels.tiles import Config
from loka_compile.kernels.tiles import config_for
from loka_compile.kernels.tiles import fits
from loka_compile.kernels.tiles import form_of
from loka_compile.kernels.tiles import programs_of
from loka_compile.kernels.tiles import programs_per_sm
from loka_compile.kernels.tiles import whole_tiles


@dataclass
class Recipe:
    """What `fused_forward` asks once per signature of its arguments."""

    device: torch.device
    call: Call
    split: int
    #: None: no such result, or no workspace since nothing is split.
    y: Room
    yt: Room | None
    u: Room | None
    r: Room | None
    partial: Room | None
    box_a: Box
    box_w: Box


def recipe_of(
    launch: Launcher,
    shape: torch.Size,
    w_shape: torch.Size,
    block: int,
    eps: float,
    act: str,
    gate: bool,
    norm: bool,
    fast_accum: bool,
    transposed: bool,
    out_dtype: torch.dtype,
    save_dtype: torch.dtype | None,
    wide_out: bool,
    a_rows: tuple[int, ...],
    w_rows: tuple[int, ...],
    gain: tuple[torch.dtype, int] | None,
    bias: tuple[torch.dtype, int] | None,
    mul: tuple[torch.dtype, int] | None,
    addend: tuple[torch.dtype, int] | None,
    device: torch.device,
    config: Config | None,
) -> Recipe:
    """a_rows, w_rows: () one scale, (1,) one per row, else the strides of many along K. gain, bias,
    mul, addend: dtype and dimensions. Raises ValueError for a config that cannot run."""
    (m, k), n = shape, w_shape[0]
    blocks = bn.count_blocks(n, block)
    grouped = len(a_rows) > 1
    if config is None:
        operands = sum(form is not None and form[1] > 1 for form in (mul, addend))
        # A gate whose factors are saved holds as much as another operand.
        operands += gate and save_dtype is not None
        form = form_of(not wide_out, save_dtype is not None, transposed, operands, norm, grouped)
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
    if grouped and config.block_k != 128:
        raise ValueError(f"block_k={config.block_k}: a scale per 128 values asks for steps of 128")
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
        "WHOLE": n % block == 0 and block == wide,
        "A_ROWS": len(a_rows),
        "W_ROWS": len(w_rows),
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
    strides = (*a_rows, *w_rows) if grouped else (0, 0, 0, 0)
    # Partial sums are as wide as what is made of them: half the traffic, and an error of one more
    # rounding of the result.
    wide_results = torch.float32 in (dtype, save_dtype)
    partial_dtype = torch.float32 if wide_results else torch.bfloat16
    # Sizes of the layer are settled by it; of those that follow the batch, their kind.
    key = (
        config,
        kind(m, m_up, full, *strides),
        (n, k, block),
        dtype,
        save_dtype,
        tuple(None if one is None else one[0] for one in (gain, bias, mul, addend)),
        tuple(constants.values()),
        device.index,
    )
    split_tiles = (tiles - full) * config.split_k if config.split_k > 1 else 0
    # A program works off one split part at most.
    places = max(programs, split_tiles)
    if config.split_k == 1 and not interpreted:
        places *= programs_per_sm(config, wide, steps)
    grid = (min(places, split_tiles + (full if split_tiles else tiles)),)
    scalars = (m, m_up, full, n, k, block, blocks, *strides, float(eps))
    options: dict[str, Any] = {"num_warps": config.warps, "num_stages": config.stages}
    options["pdl"] = constants["PDL"]
    workspace = split_tiles * config.block_m * wide
    saves = save_dtype is not None
    return Recipe(
        device,
        Call(launch, grid, scalars, constants, key, device, **options),
        config.split_k,
        dense((m, n), dtype),
        dense((n, m_up), dtype) if transposed else None,
        dense((m, n), save_dtype) if save_dtype is not None else None,
        dense((m, blocks), torch.float32) if saves and norm else None,
        dense((workspace,), partial_dtype) if workspace else None,
        Box(config.block_m, config.block_k),
        Box(wide, config.block_k),
    )
