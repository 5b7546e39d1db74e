"""Gradients of the `loka::` ops: what a forward keeps, and which ops its backward is made of."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from loka_compile.errors import DoubleBackwardError
from loka_compile.lowering import chain
from loka_compile.lowering import chain_backward  # noqa: F401  (registers what a backward calls)
from loka_compile.lowering import gemm
from loka_compile.lowering import meters
from loka_compile.lowering.recipes import HIGH_PRECISION

# The `probe` of an op: nothing; cells alone (`meters.py`); an observer's cell and what orders it;
# those and the cell once more, where few sites are asked at a time (`probe/turns.py`); and behind
# these the u and the gain, if any, of the chain that hands the input over as e4m3 and writes it
# nowhere else.

#: What ends a chain that may do so where its reader is observed.
HANDED_ACT = "hard_swish"


def observe(g: Tensor, probe: list[Tensor]) -> None:
    if len(probe) > 1:
        torch.ops.loka.observe(g, *probe[:2])


Seen = tuple[Tensor | None, Tensor | None, str]


def observe_coherence(gw: Tensor, g: Tensor, seen: Seen, probe: list[Tensor]) -> None:
    x, gain, act = seen
    if len(probe) > 1 and x is not None:
        torch.ops.loka.observe_coherence(gw, g, x, *probe[:2], gain, act)


def for_observers(x: Tensor, x8: Tensor | None, probe: list[Tensor]) -> Tensor | None:
    """x, where observers in the backward want it and wgrad reads what was handed over."""
    return x if x8 is not None and len(probe) == 3 else None


def seen_input(kept, x: Tensor | None, probe: list[Tensor]) -> Seen:
    """What observers are told of a linear's input: it and nothing else, or u, gain and activation.
    kept: what wgrad reads; x: what `for_observers` gave."""
    if len(probe) > 3:
        return probe[3], probe[4] if len(probe) > 4 else None, HANDED_ACT
    return kept[0] if x is None else x, None, ""


def in_turn(probe: list[Tensor]) -> bool:
    """Most sites rest: what an observer alone needs is better made when it is asked."""
    return len(probe) > 2


def unless_recorded(cells: Tensor | None, dgrad: str) -> Tensor | None:
    """For wgrad: whatever stores one maximum twice is a kernel more."""
    return None if gemm.records(dgrad, "dgrad") else cells


def kept_input(x, x8, x_scale, x8t, wgrad):
    """What wgrad will read of a linear's input: (x, x8, x_scale, x8t), the fewest bytes of it."""
    if x8 is None:
        return x, None, None, None
    if x8t is not None and wgrad != HIGH_PRECISION:
        return None, None, x_scale, x8t
    return None, x8, x_scale, None


def wgrad_of(gy, kept, wgrad, dtype, gy8t=None, gyt_scale=None, cells=None):
    x, x8, x_scale, x8t = kept
    if x8 is not None:
        # Without a transposed copy the handed input is widened again.
        x, x_scale = (x8.to(torch.float32) * x_scale).to(dtype), None
    return torch.ops.loka.linear_wgrad(gy, x, wgrad, gy8t, gyt_scale, x8t, x_scale, cells)


def linear_setup(ctx, inputs, output) -> None:
    x, w, bias, _, dgrad, wgrad, probe, x8, x_scale, x8t, _, _, w8t, wt_scale = inputs
    kept = kept_input(x, x8, x_scale, x8t, wgrad)
    ctx.save_for_backward(w, w8t, wt_scale, for_observers(x, x8, probe), *kept, *probe)
    ctx.kernels = (dgrad, wgrad)
    ctx.dtype = x.dtype
    ctx.has_bias = bias is not None


def linear_backward(ctx, gy):
    # Unpacked once: a checkpoint allows no more.
    w, w8t, wt_scale, x, *kept = ctx.saved_tensors
    kept, probe = kept[:4], kept[4:]
    dgrad, wgrad = ctx.kernels
    cells = meters.cells_of(probe)
    observe(gy, probe)
    gx = gw = None
    if ctx.needs_input_grad[0]:
        gx = torch.ops.loka.linear_dgrad(gy, w, dgrad, None, None, w8t, wt_scale, cells)
        cells = unless_recorded(cells, dgrad)
    if ctx.needs_input_grad[1]:
        gw = wgrad_of(gy, kept, wgrad, ctx.dtype, cells=cells)
        observe_coherence(gw, gy, seen_input(kept, x, probe), probe)
    gb = None
    if ctx.has_bias and ctx.needs_input_grad[2]:
        gb = gy.reshape(-1, gy.shape[-1]).sum(0)
    return (gx, gw, gb, None, None, None, [None] * len(probe), *([None] * 7))


def block_norm_setup(ctx, inputs, output) -> None:
    x, gain, block, *_ = inputs
    _, r = output
    ctx.mark_non_differentiable(r)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, r, gain)
    ctx.block = block


def block_norm_backward(ctx, gy, _gr):
    if gy is None:
        return None, None, None, None, None
    x, r, gain = ctx.saved_tensors
    gx, ggain = torch.ops.loka.block_norm_backward(gy, x, r, gain, ctx.block)
    return gx, (None if gain is None else ggain), None, None, None


def fused_setup(ctx, inputs, output) -> None:
    x, x8, x_scale, w, gain, block, _, act, gate, fwd, dgrad, wgrad, _, probe, x8t, *rest = inputs
    _, y8, y_scale, u, r, y8t = output
    ctx.mark_non_differentiable(y8, y_scale, u, r, y8t)
    ctx.set_materialize_grads(False)
    kept = kept_input(x, x8, x_scale, x8t, wgrad)
    # w transposed and quantised already, or None.
    *turned, addend = rest[-3:]
    ctx.save_for_backward(w, *turned, gain, u, r, for_observers(x, x8, probe), *kept, *probe)
    ctx.kernels = (fwd, dgrad, wgrad)
    ctx.dtype = x.dtype
    ctx.addend = None if addend is None else addend.dtype
    ctx.epilogue = (block, act, gate)


def fused_backward(ctx, gy, *_):
    w, w8t, wt_scale, gain, u, r, x, *kept = ctx.saved_tensors
    kept, probe = kept[:4], kept[4:]
    none: list[Any] = [None] * 21
    none[13] = [None] * len(probe)
    if gy is None:
        return tuple(none)
    fwd, dgrad, wgrad = ctx.kernels
    needs_x, needs_w = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
    rules = chain.backward_rules(*ctx.kernels)
    by_groups = chain.group_rules(fwd, dgrad, wgrad, gy.shape[-1], ctx.epilogue[0])
    gy8 = gy_scale = gy8t = gyt_scale = None
    rows = math.prod(gy.shape[:-1])
    # Without rows there is no maximum to scale by.
    some = not isinstance(rows, int) or rows > 0
    # An addend's gradient is dL/dz itself, which our kernel does not write.
    added = ctx.addend is not None and ctx.needs_input_grad[20]
    cells = meters.cells_of(probe)
    # Observers want dL/dz in bf16.
    seen = seen_input(kept, x, probe)
    free = len(probe) < 2 or (in_turn(probe) and seen[0] is not None)
    fused = (rules or by_groups) and needs_x and needs_w and free and some and not added
    if fused:
        # dL/dz leaves our kernel quantised for both GEMMs; its bf16 form is never written.
        gz = gy
        parts = [t.reshape(-1, t.shape[-1]) for t in (gy, u, r)]
        op = torch.ops.loka.fused_chain_backward
        how: list[Any] = [v for operand in rules or () for v in (operand.rows, operand.dtype)]
        how.append(cells)
        if by_groups:
            op = torch.ops.loka.fused_chain_backward_groups
            how = [operand.dtype for operand in by_groups]
        gy8, gy_scale, gy8t, gyt_scale, ggain = op(*parts, gain, *ctx.epilogue, *how)
        if gain is not None:
            ggain = ggain.sum(0).to(gain.dtype)
    else:
        gz, ggain = torch.ops.loka.block_norm_act_backward(gy, u, r, gain, *ctx.epilogue)
        observe(gz, probe)
    if gain is not None:
        none[4] = ggain
    if added:
        none[20] = gz.to(ctx.addend)
    if needs_x:
        none[0] = torch.ops.loka.linear_dgrad(gz, w, dgrad, gy8, gy_scale, w8t, wt_scale, cells)
        cells = unless_recorded(cells, dgrad)
    if needs_w:
        none[3] = wgrad_of(gz, kept, wgrad, ctx.dtype, gy8t, gyt_scale, cells)
        if fused and in_turn(probe):
            torch.ops.loka.observe_chain(
                none[3], gy, u, r, gain, *ctx.epilogue, seen[0], *probe[:2], *seen[1:]
            )
        elif not fused:
            observe_coherence(none[3], gz, seen, probe)
    return tuple(none)


def no_second_order(name: str):
    def backward(ctx, *grads):
        raise DoubleBackwardError(f"loka::{name}")

    return backward
