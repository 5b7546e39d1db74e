"""Amax, sum of squares and exact zeros of many weights, recorded in two launches for all of them.

    1 parts   per weight and program: the three numbers over its share of the values
    2 record  per weight: the numbers of the whole, merged into its row of the state

The definition is `probe.weights.observe_ref`; the state is described there. Weights are read where
they lie, by their addresses: whoever calls says so anew when one has moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka_compile.kernels.fp8 import magnitude
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import aligned
from loka_compile.kernels.launch import empty
from loka_compile.kernels.launch import kind

_TRITON = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
#: Programs per weight.
_PARTS = 256


@triton.jit
def _parts_kernel(
    places, part, W, LIKE: tl.constexpr, ALIGNED: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    one, share = tl.program_id(0), tl.program_id(1)
    base = tl.load(places + one).to(tl.pointer_type(LIKE))
    if ALIGNED:
        # What Triton knows of an argument, and not of an address in memory.
        base = tl.multiple_of(base, 16)
    count = tl.load(places + W + one)
    top = tl.zeros((BLOCK,), dtype=tl.int32)
    zeros = tl.zeros((BLOCK,), dtype=tl.int32)
    square = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(share * BLOCK, count, PARTS * BLOCK):
        at = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = at < count
        v = tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
        top = tl.maximum(top, magnitude(v))
        zeros += (inside & (v == 0)).to(tl.int32)
        square += v.to(tl.float64) * v.to(tl.float64)
    to = part + (one * PARTS + share) * 3
    # As bits, which order like the values: NaN is above all.
    tl.store(to, tl.max(top, axis=0).to(tl.float64))
    tl.store(to + 1, tl.sum(square, axis=0))
    tl.store(to + 2, tl.sum(zeros, axis=0).to(tl.float64))


@triton.jit
def _record_kernel(
    places, part, state, W, WIDTH: tl.constexpr, EW: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    one = tl.program_id(0)
    at = part + (one * PARTS + tl.arange(0, PARTS)) * 3
    count = tl.load(places + W + one).to(tl.float64)
    amax = tl.max(tl.load(at), axis=0).to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)
    square = tl.sum(tl.load(at + 1), axis=0)
    zeros = tl.sum(tl.load(at + 2), axis=0) / count
    # A sum of squares beyond FP32 is as bad as a value that is not finite.
    good = (amax < float("inf")) & (square < 3.4e38)
    rms = tl.sqrt(square / count)
    row = state + one * WIDTH
    tl.store(row, amax, mask=good)
    tl.store(row + 1, rms, mask=good)
    tl.store(row + 2, zeros, mask=good)
    bad = tl.where(good, 0.0, 1.0).to(tl.float64)
    tl.store(row + 3, tl.load(row + 3) + bad)
    probes = tl.load(row + 7)
    weight = tl.where(probes == 0, 1.0, EW).to(tl.float64)
    amax_ew, rms_ew, most = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    tl.store(row + 4, amax_ew + (amax - amax_ew) * weight, mask=good)
    tl.store(row + 5, rms_ew + (rms - rms_ew) * weight, mask=good)
    tl.store(row + 6, tl.maximum(most, amax), mask=good)
    tl.store(row + 7, probes + 1 - bad)


_parts = Launcher(_parts_kernel)
_record = Launcher(_record_kernel)


def why_not(weights: Sequence[Tensor]) -> str | None:
    """Why these cannot be read by their addresses; None where they can."""
    first = weights[0]
    if first.dtype not in _TRITON:
        return f"dtype {first.dtype}"
    for w in weights:
        if type(w) not in (Tensor, torch.nn.Parameter):
            return f"a tensor subclass, {type(w).__name__}"
        if w.dtype != first.dtype or w.device != first.device:
            return "of several dtypes or devices"
        dense = w.is_contiguous() or (w.dim() == 2 and w.t().is_contiguous())
        if not w.numel() or not dense:
            return "with gaps between its values"
    return None


@dataclass(frozen=True)
class Places:
    """addresses: of the first values. table (2, W) int64 on their device: the addresses, and the
    number of values of each."""

    addresses: tuple[int, ...]
    table: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, weights: Sequence[Tensor]) -> Places:
        """Of weights that `why_not` has nothing against. The host does not wait."""
        addresses = addresses_of(weights)
        sizes = [w.numel() for w in weights]
        table = torch.tensor([addresses, sizes], dtype=torch.int64, device="cpu")
        device = weights[0].device
        if device.type != "cpu":
            table = table.pin_memory().to(device, non_blocking=True)
        return cls(addresses, table, weights[0].dtype)


def addresses_of(weights: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(w.data_ptr() for w in weights)


def record(places: Places, state: Tensor, ew: float) -> None:
    """Record the weights at `places` into `state` (W, WIDTH) fp64, contiguous.

    ew: weight of the newest probe in the exponentially weighted numbers.
    """
    table, device = places.table, state.device
    count = table.shape[1]
    part = empty((count, _PARTS, 3), torch.float64, device)
    even = all(at % 16 == 0 for at in places.addresses)
    constants = {"LIKE": _TRITON[places.dtype], "ALIGNED": even, "PARTS": _PARTS, "BLOCK": 2048}
    key = (kind(count), aligned(table, part), even, places.dtype, device.index)
    _parts(key, (count, _PARTS), (table, part, count), constants, device, num_warps=8)
    constants = {"WIDTH": state.shape[1], "EW": ew, "PARTS": _PARTS}
    key = (kind(count), aligned(table, part, state), *constants.values(), device.index)
    _record(key, (count,), (table, part, state, count), constants, device, num_warps=1)
