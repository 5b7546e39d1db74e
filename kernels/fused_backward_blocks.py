"""One kernel and one read: dL/dy -> dL/dz, in FP8 in both orientations, a scale per 1 x 128 values.

    q  (M, N), scaled along N for dgrad         qt (N, M up to 16), scaled along M for wgrad

A scale of 128 rows or columns is found inside a tile of 128 rows and one block, so nothing is read
to find it beforehand: see `fused_backward` for scales that need it, and for the formulas. q is made
of dL/dz in FP32; qt of dL/dz rounded to bf16, which is how it waits for its scale. Both scales are
of maxima rounded to bf16, found two at a time. That costs nothing: a maximum that rounds down to
448 saturates there, and at twice the scale, too, no FP8 value would be nearer.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace
from typing import Any
from typing import cast

import torch
import triton
from torch import Tensor

from loka_compile.kernels import block_norm as bn
from loka_compile.kernels import quantize
from loka_compile.kernels.backward_blocks_kernel import blocks_kernel
from loka_compile.kernels.call import Call
from loka_compile.kernels.fp8 import LIKE
from loka_compile.kernels.gradient_tile import ACTIVATIONS
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import Recipes
from loka_compile.kernels.launch import kind
from loka_compile.kernels.launch import overlaps
from loka_compile.kernels.launch import shared_memory
from loka_compile.kernels.orientations import Both
from loka_compile.kernels.orientations import Scale
from loka_compile.kernels.orientations import quantize_both_ref
from loka_compile.kernels.quantize import FP8_MAX
from loka_compile.kernels.quantize import exponent_split
from loka_compile.kernels.quantize_blockwise import spread_groups
from loka_compile.kernels.room import Room
from loka_compile.kernels.room import allocator
from loka_compile.kernels.room import dense
from loka_compile.kernels.tiles import programs_of

#: Values that share a scale, along either dimension.
GROUP = 128
#: Measured on an H200: more reads ahead, in more of the shared memory, make it slower.
MOST_STAGES = 3


_launch = Launcher(blocks_kernel)


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
        u.shape, gy.dtype, gy.get_device(), u.dtype, u.get_device(), r.get_device(),
        None if gain is None else (gain.dtype, gain.get_device()), block, act, gate,
        straight.kind, straight.dtype, straight.turned, straight.multiple,
        turned.kind, turned.dtype, turned.turned, turned.multiple, warps,
    )  # fmt: skip
    how = RECIPES.get(signature)
    if how is None:
        how = RECIPES[signature] = _recipe(
            u.shape, gy.dtype, u.dtype, None if gain is None else gain.dtype, block, act, gate,
            straight, turned, u.device, warps,
        )  # fmt: skip
    make = allocator(how.device)
    q, scale, qt, scale_t = make(*how.q), make(*how.scale), make(*how.qt), make(*how.scale_t)
    partial = make(*how.partial)
    both = Both(q, scale, qt, scale_t)
    if u.shape[0] == 0:
        return both, partial
    tensors = (gy, u, r, gain if gain is not None else r, q, scale, qt, scale_t, partial)
    if not how.call.start([t.data_ptr() for t in tensors]):
        how.call.run((*tensors[:6], qt.view(torch.int64), *tensors[7:]))
    return both, partial


@dataclass
class _Recipe:
    """All of a launch that follows from shapes, dtypes and switches."""

    device: torch.device
    q: Room
    scale: Room
    qt: Room
    scale_t: Room
    partial: Room
    call: Call


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
    whole = m % GROUP == 0 and n % block == 0 and block == wide
    # Measured on an H200: few warps with all registers that they can have. Those of an SM are two
    # programs' where a value takes few.
    few = whole and wide <= 2 * GROUP and gain_dtype is None
    warps = warps or (4 if few else 8)
    per_sm = max(1, 8 // warps)
    programs = blocks * programs_per_block(tall, blocks, per_sm * programs_of(device))
    constants: dict[str, Any] = {
        "BN": wide,
        "WHOLE": whole,
        "ACT": ACTIVATIONS[act],
        "GATE": gate,
        "GAIN": gain_dtype is not None,
        "PDL": overlaps(device),
        "EXACT": device.type != "cuda",
        "STAGES": stages_of(wide, gy_dtype.itemsize + u_dtype.itemsize, per_sm, device),
    }
    places = []
    for rule, lines, along, tail in ((straight, m, n, ""), (turned, n, m, "_T")):
        exponent, mantissa = exponent_split(rule.dtype)
        if tail:
            constants["LIKE_T"] = LIKE[rule.dtype]
        constants |= {
            "TURNED" + tail: rule.turned,
            "MAX" + tail: FP8_MAX[rule.dtype],
            "EXPONENT" + tail: exponent,
            "MANTISSA" + tail: mantissa,
        }
        outer = rule.shape(lines, along)[1]
        places += [outer, outer if rule.turned else lines]
    sizes = (m, m_up, n, block, blocks, *places)
    key = (
        kind(m, m_up, *places),
        (n, block, warps),
        (gy_dtype, u_dtype, gain_dtype, straight.dtype, turned.dtype),
        tuple(constants.values()),
        device.index,
    )
    call = Call(
        _launch, (programs,), sizes, constants, key, device, num_warps=warps, pdl=constants["PDL"]
    )
    return _Recipe(
        device,
        dense((m, n), straight.dtype),
        dense(straight.shape(m, n), torch.float32),
        dense((n, m_up), turned.dtype),
        dense(turned.shape(n, m), torch.float32),
        dense((tall, n) if gain_dtype is not None else (0,), torch.float32),
        call,
    )


def programs_per_block(tall: int, blocks: int, slots: int) -> int:
    """Programs that share the `tall` tiles of each block of columns, `slots` programs running at a
    time: as many as end first, and no more than that takes."""

    def turns(lanes: int) -> int:
        # Four a tile, and about one until the first reads are there.
        return -(-blocks * lanes // slots) * (4 * -(-tall // lanes) + 1)

    return min(range(1, min(tall, slots) + 1), key=turns, default=1)


def stages_of(wide: int, size: int, programs: int, device: torch.device) -> int:
    """Stages of the pipeline that shared memory holds, with so many programs on an SM: of each but
    one the reads of a pair of parts, 32 rows of `wide` places and `size` bytes; and 16 words of qt
    a column, of one group or of all."""
    room = 227 << 10
    if device.type == "cuda":
        room = shared_memory(device)
    # The system has a KiB of each program's. Besides: r, what reductions exchange.
    left = (room + 1024) // programs - 1024 - 512
    left -= 128 * (GROUP if wide == 2 * GROUP else wide)
    return max(1, min(MOST_STAGES, 1 + left // (32 * wide * size)))


def fused_backward_blocks_ref(gz: Tensor, straight: Scale, turned: Scale) -> Both:
    """The quantising in plain torch, of dL/dz (M, N) in FP32; see `lowering.formulas` for that."""
    rounded = quantize_both_ref(gz, straight, turned, dtype=torch.bfloat16)
    scale = cast(Tensor, rounded.scale)
    lines = (scale.t() if straight.turned else scale)[: gz.shape[0]]
    inverse = spread_groups(1.0 / lines, gz.shape[1])
    return replace(rounded, q=quantize.cast(gz, inverse, straight.dtype))
