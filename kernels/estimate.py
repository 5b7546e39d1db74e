"""An error estimate's ends, in a launch each: plain torch takes some forty for them.

    clean   rows held by the Probe -> those that are real and finite, zeros for the others, and a
            last row that holds the newest batch's maximum alone, so that one scale covers it
    error   results of a kernel and of the reference -> their clamped mean relative error

`clean_ref` and `error_ref` are the definitions.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka_compile.kernels.call import Call
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import Recipes
from loka_compile.kernels.launch import kind
from loka_compile.kernels.room import allocator
from loka_compile.kernels.room import dense

#: Scalars before the ring of maxima, and the places of two; they are those of `probe.statistics`.
_HEAD, _BATCHES, _CANDIDATES = 8, 0, 3
#: Channels that one program of `error` takes.
MOST_CHANNELS = 256


@triton.jit
def _clean_kernel(
    rows, scalars, clean, good, C, R: tl.constexpr, HEAD: tl.constexpr, RING: tl.constexpr,
    BATCHES: tl.constexpr, CANDIDATES: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = row.to(tl.int64) * C
    if row < R:
        bad = tl.zeros((BC,), dtype=tl.int32)
        for c0 in range(0, C, BC):
            cols = c0 + tl.arange(0, BC)
            v = tl.load(rows + at + cols, mask=cols < C, other=0.0).to(tl.float32)
            bad += (~(tl.abs(v) < float("inf"))).to(tl.int32)
        ok = (tl.sum(bad, axis=0) == 0) & (row < tl.load(scalars + CANDIDATES))
        tl.store(good + row, ok.to(tl.int32))
        for c0 in range(0, C, BC):
            cols = c0 + tl.arange(0, BC)
            held = tl.load(rows + at + cols, mask=(cols < C) & ok, other=0.0)
            tl.store(clean + at + cols, held, mask=cols < C)
    else:
        newest = tl.maximum(tl.load(scalars + BATCHES).to(tl.int64) - 1, 0) % RING
        amax = tl.load(scalars + HEAD + newest).to(tl.float32)
        for c0 in range(0, C, BC):
            cols = c0 + tl.arange(0, BC)
            alone = tl.where(cols == 0, amax, 0.0).to(clean.dtype.element_ty)
            tl.store(clean + at + cols, alone, mask=cols < C)


@triton.jit
def _error_kernel(
    out, ref, good, error, N, FLOOR: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BN)
    channel = tl.zeros((BN,), dtype=tl.float64)
    count = tl.zeros((), dtype=tl.int32)
    for r0 in range(0, R, BR):
        rows = r0 + tl.arange(0, BR)
        live = (rows < R)[:, None] & (cols < N)[None, :]
        at = rows[:, None] * N + cols[None, :]
        v = tl.load(ref + at, mask=live, other=0.0).to(tl.float64)
        channel += tl.sum(v * v, axis=0)
        count += tl.sum(tl.load(good + rows, mask=rows < R, other=0), axis=0)
    size = tl.sqrt(tl.sum(channel, axis=0))
    share = FLOOR * tl.sqrt(channel) / size
    found = tl.zeros((), dtype=tl.float64)
    for r0 in range(0, R, BR):
        rows = r0 + tl.arange(0, BR)
        live = (rows < R)[:, None] & (cols < N)[None, :]
        at = rows[:, None] * N + cols[None, :]
        v = tl.load(ref + at, mask=live, other=0.0).to(tl.float64)
        got = tl.load(out + at, mask=live, other=0.0).to(tl.float64)
        floor = tl.sqrt(tl.sum(v * v, axis=1))[:, None] * share[None, :]
        scale = tl.maximum(tl.abs(v), floor)
        # Neither where all is zero nor where a weight is not finite: then the floor is NaN.
        some = live & (scale > 0) & (floor == floor)
        each = tl.where(some, tl.abs(got - v) / tl.where(some, scale, 1.0), 0.0)
        found += tl.sum(tl.sum(each, axis=1), axis=0)
    tl.store(error, (found / (tl.maximum(count, 1) * N).to(tl.float64)).to(tl.float32))


def clean(rows: Tensor, scalars: Tensor) -> tuple[Tensor, Tensor]:
    """rows (R + 1, C), contiguous, and scalars, as the Probe holds them -> (R + 1, C), the last row
    the newest maximum's; int32 (R,), 1 where a row is real and finite."""
    signature = (rows.shape, rows.dtype, scalars.shape, rows.device)
    how = RECIPES.get(signature)
    if how is None:
        how = RECIPES[signature] = _CleanRecipe(*signature)
    make = allocator(rows.device)
    made, good = make(*how.clean), make(*how.good)
    tensors = (rows, scalars, made, good)
    if not how.call.start([t.data_ptr() for t in tensors]):
        how.call.run(tensors)
    return made, good


def clean_ref(rows: Tensor, scalars: Tensor) -> tuple[Tensor, Tensor]:
    ring = (scalars.shape[0] - _HEAD) // 2
    held = rows[:-1]
    slot = torch.arange(held.shape[0], device=rows.device)
    good = (slot < scalars[_CANDIDATES]) & torch.isfinite(held).all(dim=1)
    made = torch.zeros_like(rows)
    made[:-1] = torch.where(good.unsqueeze(1), held, 0.0)
    newest = (scalars[_BATCHES].long() - 1).clamp(min=0) % ring
    made[-1, 0] = scalars.gather(0, (_HEAD + newest).reshape(1)).squeeze(0).to(rows.dtype)
    return made, good.int()


def error(out: Tensor, ref: Tensor, good: Tensor, floor: float) -> Tensor:
    """out and ref (R + 1, N), contiguous, N <= MOST_CHANNELS, whose last row does not count; good:
    int32 (R,) -> () fp32: mean of |out - ref| / max(|ref|, floor x row x channel) over the rows
    that are good; row and channel: the sizes of ref's, the latter as a share of the whole.

    Raises ValueError for other layouts.
    """
    if out.shape != ref.shape or not (out.is_contiguous() and ref.is_contiguous()):
        raise ValueError(f"results of {tuple(out.shape)} and {tuple(ref.shape)}, want contiguous")
    if out.shape[1] > MOST_CHANNELS:
        raise ValueError(f"{out.shape[1]} channels, want at most {MOST_CHANNELS}")
    signature = (out.shape, out.dtype, ref.dtype, floor, out.device)
    how = RECIPES.get(signature)
    if how is None:
        how = RECIPES[signature] = _error_call(*signature)
    made = allocator(out.device)((), (), torch.float32)
    tensors = (out, ref, good, made)
    if not how.start([t.data_ptr() for t in tensors]):
        how.run(tensors)
    return made


def error_ref(out: Tensor, ref: Tensor, good: Tensor, floor: float) -> Tensor:
    out, ref = out[:-1].double(), ref[:-1].double()
    row, channel = ref.norm(dim=1, keepdim=True), ref.norm(dim=0, keepdim=True)
    scale = ref.abs().maximum(floor * row * (channel / ref.norm()))
    each = torch.where(scale > 0, (out - ref).abs() / scale, 0.0)
    return (each.sum() / (good.sum().clamp(min=1) * each.shape[1])).float()


_clean = Launcher(_clean_kernel)
_error = Launcher(_error_kernel)


class _CleanRecipe:
    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        scalars: torch.Size,
        device: torch.device,
    ) -> None:
        count, c = shape
        self.clean, self.good = dense(shape, dtype), dense((count - 1,), torch.int32)
        constants = {
            "R": count - 1, "HEAD": _HEAD, "RING": (scalars[0] - _HEAD) // 2, "BATCHES": _BATCHES,
            "CANDIDATES": _CANDIDATES, "BC": min(1024, triton.next_power_of_2(c)),
        }  # fmt: skip
        key = (kind(c), tuple(constants.values()), dtype, device.index)
        self.call = Call(_clean, (count,), (c,), constants, key, device, num_warps=4)


def _error_call(
    shape: torch.Size,
    out: torch.dtype,
    ref: torch.dtype,
    floor: float,
    device: torch.device,
) -> Call:
    count, n = shape
    block = triton.next_power_of_2(n)
    # As many values at a time as a program's registers hold.
    rows = max(1, min(16, 2048 // block))
    constants: dict[str, Any] = {"FLOOR": floor, "R": count - 1, "BR": rows, "BN": block}
    key = (kind(n), tuple(constants.values()), out, ref, device.index)
    return Call(_error, (1,), (n,), constants, key, device, num_warps=8)


RECIPES = Recipes()
