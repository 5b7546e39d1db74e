"""How a launch of the fused forward spreads its tiles over programs: whole, split, or shared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from loka_compile.kernels.tiles import SHARED
from loka_compile.kernels.tiles import STREAM
from loka_compile.kernels.tiles import Config
from loka_compile.kernels.tiles import fits
from loka_compile.kernels.tiles import whole_tiles

#: What a helper of STREAM spends beside its steps, in steps: on a part's partial sums and on its
#: first operands, for the parts that one has.
_HELPING = 3.0
#: Shared memory that a program needs besides, and the most of them that an SM is given.
_RESERVED, _MOST_PER_SM = 2 << 10, 4


@dataclass(frozen=True)
class Schedule:
    """programs: of the grid. ahead: `full` of `fused_kernel`, `head` of `stream_kernel`. partial:
    partial sums that the workspace holds, of a tile each. constants: the kernel's switches."""

    programs: int
    ahead: int
    partial: int
    constants: dict[str, Any]


def schedule_of(
    config: Config, tiles: int, steps: int, wide: int, programs: int, interpreted: bool
) -> Schedule:
    """Of `tiles` tiles, `wide` columns each, and `steps` steps along K. Raises ValueError for a
    split that cannot run with `programs` at once."""
    split = config.split_k
    if split == STREAM:
        if steps < 2 or not fits(tiles, STREAM, programs):
            raise ValueError(
                f"split_k={STREAM} with {tiles} tiles, {steps} steps and {programs} programs: it "
                "asks for two steps, and for more programs than tiles, but not twice as many"
            )
        head = head_of(tiles, steps, programs)
        most = most_parts(tiles, steps, head, programs)
        return Schedule(programs, head, tiles * most, {"MOST": most})
    if not interpreted and not fits(tiles, split, programs):
        raise ValueError(
            f"split_k={split} with {tiles} tiles needs more programs than the {programs} "
            "that are resident at once; take a smaller split"
        )
    full = whole_tiles(tiles, split, programs)
    parts = (tiles - full) * split if split > 1 else 0
    # A program works off one split part at most.
    places = max(programs, parts)
    if split == 1 and not interpreted:
        places *= programs_per_sm(config, wide, steps)
    constants = {"SPLIT_K": split, "TAIL": full > 0, "FLATTEN": False}
    return Schedule(min(places, parts + (full if parts else tiles)), full, parts, constants)


def head_of(tiles: int, steps: int, programs: int) -> int:
    """Steps along K of a tile's owner, so that its helpers have just finished before it."""
    helpers = programs - tiles
    balanced = (steps * tiles + _HELPING * helpers) / programs
    return max(1, min(math.ceil(balanced), steps - 1))


def most_parts(tiles: int, steps: int, head: int, programs: int) -> int:
    """The most parts that a tile of STREAM is left in; see `stream_kernel`."""
    rest = steps - head
    shortest = tiles * rest // (programs - (tiles if head else 0))
    return (head > 0) + 1 - (1 - rest) // shortest


def programs_per_sm(config: Config, wide: int, steps: int) -> int:
    """How many programs of this tile an SM holds at once: one's epilogue then overlaps another's
    product. `steps`: of K; a pipeline is no deeper than that."""
    ring = min(config.stages, max(steps, 1)) * (config.block_m + wide) * config.block_k
    shared = max(ring, config.block_m * wide * 2) + _RESERVED
    # 64K registers: the accumulator and about as much again for a thread's addresses and values.
    registers = config.warps * 32 * (config.block_m * wide // (config.warps * 32) + 80)
    return max(1, min(SHARED // shared, 65536 // registers, _MOST_PER_SM))
