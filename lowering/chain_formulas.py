"""What the ops of a fused chain compute, in plain aten: see `formulas.py`.

z = x @ w.T + addend;  u, r = BlockNorm(z);  y = act(gain * u), in the gate form times z
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loka_compile.kernels import block_norm as bn
from loka_compile.kernels import hard_swish as hs
from loka_compile.kernels.quantize import FP8_MAX
from loka_compile.kernels.quantize import quantize_static
from loka_compile.kernels.quantize_blockwise import fill
from loka_compile.lowering import chain
from loka_compile.lowering import gemm
from loka_compile.lowering import meters
from loka_compile.lowering.formulas import as_rows
from loka_compile.lowering.formulas import exact_dtypes
from loka_compile.lowering.formulas import fold
from loka_compile.lowering.formulas import pair_of
from loka_compile.lowering.libraries.base import ALIGNMENT
from loka_compile.lowering.recipes import HIGH_PRECISION

ACTIVATIONS = ("none", "hard_swish", "hard_sigmoid")
#: What a fused op hands on: y; y as e4m3; that and its transpose, which the reader's wgrad reads.
OUTPUTS = ("y", "y8", "y8t")
_E4M3 = torch.float8_e4m3fn
_LEAST_SCALE = 1e-30


def check_epilogue(act: str, gate: bool, out: str) -> None:
    if act not in ACTIVATIONS:
        raise ValueError(f"loka::linear_block_norm_act: act {act!r}, want one of {ACTIVATIONS}")
    if out not in OUTPUTS:
        raise ValueError(f"loka::linear_block_norm_act: out {out!r}, want one of {OUTPUTS}")
    if out != "y" and (gate or act == "hard_sigmoid"):
        raise ValueError(
            f"loka::linear_block_norm_act: out {out!r} has a static scale, and only the plain "
            "forms with act 'none' or 'hard_swish' are bounded"
        )


def _activate(v: Tensor, act: str) -> Tensor:
    if act == "hard_swish":
        return hs.hard_swish(v)
    return hs.hard_sigmoid(v) if act == "hard_sigmoid" else v


def _activate_grad(v: Tensor, act: str) -> Tensor | None:
    if act == "hard_swish":
        return hs.hard_swish_grad(v)
    return hs.hard_sigmoid_grad(v) if act == "hard_sigmoid" else None


def activated(u: Tensor, gain: Tensor | None, act: str) -> Tensor:
    """The chain's result act(gain * u) in u's dtype, from the u that its backward keeps."""
    wide = bn.wide_dtype(u.dtype)
    v = u.to(wide) if gain is None else u.to(wide) * gain.to(wide)
    return _activate(v, act).to(u.dtype)


def static_scale(gain: Tensor | None, block: int, device: torch.device) -> Tensor:
    """Scale of the e4m3 output: sqrt(block) * max|gain| / 448, fp32, no pass over the output.

    |u| <= sqrt(block) for any input, since a block's mean square is 1 (a little less with eps).
    """
    bound = torch.full((), float(block) ** 0.5 / FP8_MAX[_E4M3], dtype=torch.float32, device=device)
    if gain is None:
        return bound
    # The floor keeps a zero gain from dividing by zero; the scale handed over has it too.
    return (bound * gain.detach().to(torch.float32).abs().amax()).clamp(min=_LEAST_SCALE)


def linear_block_norm_act(
    x: Tensor,
    x8: Tensor | None,
    x_scale: Tensor | None,
    w: Tensor,
    gain: Tensor | None,
    block: int,
    eps: float,
    act: str,
    gate: bool,
    fwd: str,
    dgrad: str,
    wgrad: str,
    out: str,
    probe: list[Tensor],
    x8t: Tensor | None = None,
    w8: Tensor | None = None,
    w_scale: Tensor | None = None,
    save: bool = True,
    w8t: Tensor | None = None,
    wt_scale: Tensor | None = None,
    addend: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """z = x @ w.T + addend;  u, r = BlockNorm(z);  y = act(gain * u), with `gate` times z.

    x8, x_scale: x as e4m3 from the producer; x itself then only carries the gradient (x8t: its
    transpose, for wgrad). w8, w_scale: w, quantised already (w8t, wt_scale: for dgrad). Returns
        y (..., N); not written where `out` hands over e4m3 and the kernel is ours
        y8 (..., N) e4m3 and y_scale (), where `out` is not "y"; else empty
        u (..., N) in x's dtype and r (..., blocks), which the backward needs; with `save`
        y8t (N, M up to 16) e4m3, where `out` is "y8t"; else empty
    """
    check_epilogue(act, gate, out)
    with exact_dtypes(x.device.type):
        lead, features = x.shape[:-1], w.shape[0]
        y_scale = x.new_empty((0,), dtype=torch.float32)
        if out != "y":
            y_scale = static_scale(gain, block, x.device)
        ready = (pair_of(x8, x_scale), pair_of(w8, w_scale))
        form = (gain, block, eps, act, gate)
        addend = None if addend is None else as_rows(addend)
        nothing = isinstance(math.prod(lead), int) and math.prod(lead) == 0
        if nothing:
            # No maximum to scale by; the shapes are all that is asked for.
            fwd, ready = HIGH_PRECISION, (None, None)
        cells = meters.cells_of(probe)
        if chain.is_own(fwd):
            y, y8, u, r, y8t = _own_kernel(
                as_rows(x), w, fwd, ready, form, out, y_scale, save, addend, cells
            )
        else:
            y, y8, u, r, y8t = _in_steps(
                as_rows(x), w, fwd, ready, form, out, y_scale, addend, cells
            )
        return (
            fold(y, lead, features),
            fold(y8, lead, features) if out != "y" else y8,
            y_scale,
            fold(u, lead, features) if save else x.new_empty((0,)),
            fold(r, lead, r.shape[-1]) if save else r.new_empty((0,)),
            y8t,
        )


Form = tuple[Tensor | None, int, float, str, bool]
Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _own_kernel(
    x: Tensor,
    w: Tensor,
    fwd: str,
    ready: gemm.Ready,
    form: Form,
    out: str,
    y_scale: Tensor,
    save: bool,
    addend: Tensor | None,
    cells: Tensor | None,
) -> Parts:
    """(y, y8, u, r, y8t) of one kernel around operands that are quantised here or came so."""
    gain, block, eps, act, gate = form
    rule = chain.rule_of(fwd)
    # A scale () serves rows too: the kernel reads it once.
    with meters.recording(cells, meters.X):
        a, a_scale = ready[0] or gemm.operand(x, rule.a, fwd)
    b, b_scale = ready[1] or gemm.operand(w, rule.b, fwd)
    y, yt, u, r = torch.ops.loka.fused_chain(
        a.contiguous(),
        a_scale,
        b.contiguous(),
        b_scale,
        None if addend is None else addend.contiguous(),
        gain,
        block,
        eps,
        True,
        act,
        gate,
        rule.fast_accum,
        x.dtype,
        None if out == "y" else y_scale,
        save,
        out == "y8t",
    )
    if out == "y":
        return y, x.new_empty((0,)), u, r, x.new_empty((0,))
    # Every reader takes y8: y is never written, and this allocation falls away when compiled.
    unread = x.new_empty((x.shape[0], w.shape[0]))
    return unread, y, u, r, yt if out == "y8t" else x.new_empty((0,))


def _in_steps(
    x: Tensor,
    w: Tensor,
    fwd: str,
    ready: gemm.Ready,
    form: Form,
    out: str,
    y_scale: Tensor,
    addend: Tensor | None,
    cells: Tensor | None,
) -> Parts:
    """(y, y8, u, r, y8t) from a GEMM and its epilogue in plain aten."""
    gain, block, eps, act, gate = form
    if fwd == HIGH_PRECISION and ready[0] is not None:
        q, scale = ready[0]
        x = (q.to(torch.float32) * scale).to(x.dtype)
    # Emulating our own kernel: the accumulator is not rounded before the epilogue.
    wide = bn.wide_dtype(x.dtype)
    kept = wide if fwd.startswith(chain.OWN) else x.dtype
    z = gemm.forward(x, w, fwd, out_dtype=kept, ready=ready, cells=cells)
    if addend is not None:
        z = z.to(wide) + addend.to(wide)
    u, r = bn.normalize(z, block, eps)
    v = u if gain is None else u * gain.to(wide)
    y = _activate(v, act)
    if gate:
        y = y * z.to(wide)
    if y is u:
        # Outputs of an op may not share memory: an in-place edit of y would reach the saved u.
        y = u.clone()
    y8, y8t = x.new_empty((0,)), x.new_empty((0,))
    if out != "y":
        y8 = quantize_static(y, y_scale, _E4M3)
    if out == "y8t":
        y8t = fill(y8.t().contiguous(), 1, ALIGNMENT)
    return y.to(x.dtype), y8, u.to(x.dtype), r, y8t


def block_norm_act_backward(
    gy: Tensor,
    u: Tensor,
    r: Tensor,
    gain: Tensor | None,
    block: int,
    act: str,
    gate: bool,
) -> tuple[Tensor, Tensor]:
    """dL/dy -> (dL/dz, dL/dgain), from the saved u and r. The gain gradient is empty without gain.

    Gate form: y = z * a(v) with z = u / r, so dL/dz gains the direct term gy * a(v).
    """
    wide = bn.wide_dtype(u.dtype)
    g, u = gy.to(wide), u.to(wide)
    v = u if gain is None else u * gain.to(wide)
    direct = None
    if gate:
        z = u / bn.spread(r, u.shape[-1], block)
        direct = g * _activate(v, act)
        g = g * z
    slope = _activate_grad(v, act)
    if slope is not None:
        g = g * slope
    ggain = gy.new_empty((0,))
    if gain is not None:
        ggain = as_rows(g * u).sum(0).to(gain.dtype)
        g = g * gain.to(wide)
    gz = bn.normalize_backward(g, u, r, block)
    if direct is not None:
        gz = gz + direct
    return gz.to(gy.dtype).contiguous(), ggain
