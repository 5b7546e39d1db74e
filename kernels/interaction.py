"""Two kernels for what a factorisation machine and a linear compression read of one x (B, n, d).

    t = x^T p      fm = x t      c = l x          p (n, k), l (m, n), per sample
    gt = x^T gfm   gx = gfm t^T + p gt^T + l^T gc
    gp = sum over samples of x gt                  gl = sum over samples of gc x^T

As separate batched products these are bound by memory: x is read three times each way, and three
partial gradients of its size are written and added up. A sample's x fits into one program's shared
memory, so here it is read once each way and its gradient written once.

The plain-torch forms are `lowering.interaction.interaction_ref` and `interaction_backward_ref`.
t and gt are rounded to x's dtype in between, as separate products round them; the sums over samples
stay in FP32 to the end, per program, and are added up in a fixed order by a kernel of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from loka_compile.kernels.call import Call
from loka_compile.kernels.interaction_kernels import _backward_kernel
from loka_compile.kernels.interaction_kernels import _forward_kernel
from loka_compile.kernels.interaction_kernels import _sums_kernel
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import Recipes
from loka_compile.kernels.launch import kind
from loka_compile.kernels.room import Room
from loka_compile.kernels.room import allocator
from loka_compile.kernels.room import dense
from loka_compile.kernels.tiles import programs_of

_launch_forward = Launcher(_forward_kernel)
_launch_backward = Launcher(_backward_kernel)
_launch_sums = Launcher(_sums_kernel)


def interaction(
    x: Tensor,
    p: Tensor,
    left: Tensor | None,
    *,
    programs: int = 1,
    warps: int = 8,
    stages: int = 3,
) -> tuple[Tensor, Tensor]:
    """x (B, n, d) contiguous, p (n, k), left (m, n) or None, any strides, bf16 or fp16 ->
    fm (B, n, k) = x (x^T p), c (B, m, d) = left x (empty without `left`), in x's dtype.

    `programs` per SM and the rest as measured on an H200 (bench_interaction --sweep). Error against
    FP64: the rounding of x's dtype, of t and of the results.
    """
    signature = (*_signature(x, p, left), programs, warps, stages)
    how = FORWARD.get(signature)
    if how is None:
        how = FORWARD[signature] = _forward(x, p, left, programs, warps, stages)
    make = allocator(how.device)
    fm, c = make(*how.fm), make(*how.c)
    if x.shape[0] == 0:
        return fm, c
    tensors = (x, p, p if left is None else left, fm, fm if left is None else c)
    if not how.call.start([t.data_ptr() for t in tensors]):
        how.call.run(tensors)
    return fm, c


def interaction_backward(
    gfm: Tensor,
    gc: Tensor | None,
    x: Tensor,
    p: Tensor,
    left: Tensor | None,
    *,
    programs: int = 1,
    warps: int = 8,
    stages: int = 3,
) -> tuple[Tensor, Tensor, Tensor]:
    """gfm (B, n, k), gc (B, m, d), x (B, n, d), contiguous -> gx (B, n, d), gp (n, k), gl (m, n),
    in the dtypes of x, p, left; gl is empty without `left`.

    The samples of gc may lie apart, as they do in a slice of what a `cat` had joined."""
    signature = (
        *_signature(x, p, left), gfm.dtype, gfm.get_device(),
        None if gc is None else (gc.stride(), gc.dtype, gc.get_device()), programs, warps, stages,
    )  # fmt: skip
    how = BACKWARD.get(signature)
    if how is None:
        how = BACKWARD[signature] = _backward(gfm, gc, x, p, left, programs, warps, stages)
    make = allocator(how.device)
    gx, gp, gl = make(*how.gx), make(*how.gp), make(*how.gl)
    if x.shape[0] == 0:
        return gx, gp.zero_(), gl.zero_()
    part_p, part_l = make(*how.part_p), make(*how.part_l)
    other = p if left is None else left
    tensors = (x, p, other, gfm, gfm if gc is None else gc, gx, part_p, part_l)
    if not how.call.start([t.data_ptr() for t in tensors]):
        how.call.run(tensors)
    sums = (part_p, part_l, gp, gl)
    if not how.sums.start([t.data_ptr() for t in sums]):
        how.sums.run(sums)
    return gx, gp, gl


@dataclass
class _Forward:
    device: torch.device
    fm: Room
    c: Room
    call: Call


@dataclass
class _Backward:
    device: torch.device
    gx: Room
    gp: Room
    gl: Room
    part_p: Room
    part_l: Room
    call: Call
    sums: Call


FORWARD, BACKWARD = Recipes(), Recipes()


def _signature(x: Tensor, p: Tensor, left: Tensor | None) -> tuple:
    of_left = None
    if left is not None:
        of_left = (left.shape, left.stride(), left.dtype, left.get_device())
    return x.shape, x.dtype, x.get_device(), p.shape, p.stride(), p.dtype, p.get_device(), of_left


def _sizes(x: Tensor, p: Tensor, left: Tensor | None, stages: int) -> dict[str, int]:
    (n, d), k = x.shape[1:], p.shape[1]
    m = 0 if left is None else left.shape[0]
    sizes = {"N": n, "D": d, "K": k, "M": m}
    wide = {2 * s: max(16, triton.next_power_of_2(v)) for s, v in sizes.items()}
    return {**sizes, **wide, "STAGES": stages}


def _strides(p: Tensor, left: Tensor | None) -> tuple[int, int, int, int]:
    other = p if left is None else left
    return p.stride(0), p.stride(1), other.stride(0), other.stride(1)


def _forward(
    x: Tensor, p: Tensor, left: Tensor | None, programs: int, warps: int, stages: int
) -> _Forward:
    batch, device = x.shape[0], x.device
    sizes = _sizes(x, p, left, stages)
    shape = (batch, sizes["M"], sizes["D"]) if left is not None else (0,)
    grid = (min(batch, programs * programs_of(device)),)
    scalars = (batch, *_strides(p, left))
    call = _call(_launch_forward, grid, scalars, sizes, (x, p, left), warps, stages)
    fm = dense((batch, sizes["N"], sizes["K"]), x.dtype)
    return _Forward(device, fm, dense(shape, x.dtype), call)


def _backward(
    gfm: Tensor,
    gc: Tensor | None,
    x: Tensor,
    p: Tensor,
    left: Tensor | None,
    programs: int,
    warps: int,
    stages: int,
) -> _Backward:
    batch, device = x.shape[0], x.device
    sizes = _sizes(x, p, left, stages)
    n, k, m = sizes["N"], sizes["K"], sizes["M"]
    count = min(batch, programs * programs_of(device))
    scalars = (batch, 0 if gc is None else gc.stride(0), *_strides(p, left))
    operands = (x, p, left, gfm, gc)
    call = _call(_launch_backward, (count,), scalars, sizes, operands, warps, stages)
    # Eight loads a thread are in flight at once.
    constants = {"P": n * k, "L": m * n, "TALL": 32, "WIDE": 32}
    grid = (triton.cdiv(n * k, 32) + triton.cdiv(m * n, 32),)
    sums = _call(_launch_sums, grid, (count,), constants, (x, p, left), 4, 3)
    gl = dense((0,), x.dtype) if left is None else dense((m, n), left.dtype)
    return _Backward(
        device, dense(x.shape, x.dtype), dense((n, k), p.dtype), gl,
        dense((count, n, k), torch.float32), dense((count, m, n), torch.float32), call, sums,
    )  # fmt: skip


def _call(
    launch: Launcher,
    grid: tuple[int, ...],
    scalars: tuple[int, ...],
    constants: dict[str, int],
    operands: tuple[Tensor | None, ...],
    warps: int,
    stages: int,
) -> Call:
    dtypes = tuple(None if t is None else t.dtype for t in operands)
    device = next(t.device for t in operands if t is not None)
    key = (dtypes, kind(*scalars), tuple(constants.values()), warps, stages, device.index)
    options = {"num_warps": warps, "num_stages": stages}
    return Call(launch, grid, scalars, constants, key, device, **options)
