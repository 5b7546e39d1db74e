"""What each `loka::` op computes, in plain aten: the eager kernel and the decomposition at once.

Shapes: x (..., K), w (N, K), y (..., N); leading dimensions are flattened to M rows for the GEMM.
Statistics and epilogues run in FP32 (FP64 for FP64 input), whatever the compute dtype.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch
from torch import Tensor

from loka_compile.kernels import block_norm as bn
from loka_compile.kernels import hard_swish as hs
from loka_compile.kernels.quantize import FP8_MAX
from loka_compile.kernels.quantize import quantize_static
from loka_compile.lowering import gemm
from loka_compile.lowering.recipes import HIGH_PRECISION

ACTIVATIONS = ("none", "hard_swish", "hard_sigmoid")
OUTPUTS = ("y", "y8")
_E4M3 = torch.float8_e4m3fn
_LEAST_SCALE = 1e-30


def _rows(t: Tensor) -> Tensor:
    """(..., C) -> (M, C); 1-D counts as one row."""
    return t.reshape(-1, t.shape[-1])


def _fold(t: Tensor, lead: torch.Size, features: int) -> Tensor:
    """Dense (M, C) -> (*lead, C), not marked as a view: autograd refuses in-place edits of a custom
    op's outputs that are views (`nn.ReLU(inplace=True)` after a linear)."""
    return torch.ops.aten._unsafe_view.default(t, [*lead, features])


class _exact_dtypes:
    """Run a formula with autocast off: its casts are explicit, ambient ones would break it."""

    def __init__(self, device: str) -> None:
        self.context = torch.amp.autocast(device_type=device, enabled=False)

    def __enter__(self) -> None:
        self.context.__enter__()

    def __exit__(self, *exc: object) -> None:
        self.context.__exit__(*exc)


def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    fwd: str,
    dgrad: str,
    wgrad: str,
    probe: list[Tensor],
) -> Tensor:
    with _exact_dtypes(x.device.type):
        rows = _rows(x)
        if bias is not None and fwd == HIGH_PRECISION:
            y = torch.addmm(bias, rows, w.t())
        else:
            y = gemm.forward(rows, w, fwd)
            if bias is not None:
                y = y + bias
        return _fold(y, x.shape[:-1], w.shape[0])


def linear_dgrad(gy: Tensor, w: Tensor, kernel: str) -> Tensor:
    with _exact_dtypes(gy.device.type):
        return _fold(gemm.dgrad(_rows(gy), w, kernel), gy.shape[:-1], w.shape[1])


def linear_wgrad(gy: Tensor, x: Tensor, kernel: str) -> Tensor:
    with _exact_dtypes(gy.device.type):
        return gemm.wgrad(_rows(gy), _rows(x), kernel)


def block_norm(
    x: Tensor, gain: Tensor | None, block: int, eps: float, formula: str = ""
) -> tuple[Tensor, Tensor]:
    u, r = bn.normalize(x, block, eps)
    y = u if gain is None else u * gain.to(u.dtype)
    # Elementwise results keep the strides of x; a norm in PyTorch, and our fake, give a dense one,
    # and the user's `view` of it counts on that.
    return y.to(x.dtype).contiguous(), r.contiguous()


@functools.cache
def digest() -> str:
    """Of the source files that say what BlockNorm computes."""
    files = (Path(__file__), Path(bn.__file__))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:16]


def block_norm_backward(
    gy: Tensor, x: Tensor, r: Tensor, gain: Tensor | None, block: int
) -> tuple[Tensor, Tensor]:
    wide = bn.wide_dtype(x.dtype)
    g = gy.to(wide)
    u = x.to(wide) * bn.spread(r, x.shape[-1], block)
    ggain = x.new_empty((0,))
    if gain is not None:
        ggain = _rows(g * u).sum(0).to(gain.dtype)
        g = g * gain.to(wide)
    return bn.normalize_backward(g, u, r, block).to(x.dtype).contiguous(), ggain


def check_epilogue(act: str, gate: bool, out: str) -> None:
    if act not in ACTIVATIONS:
        raise ValueError(f"loka::linear_block_norm_act: act {act!r}, want one of {ACTIVATIONS}")
    if out not in OUTPUTS:
        raise ValueError(f"loka::linear_block_norm_act: out {out!r}, want one of {OUTPUTS}")
    if out == "y8" and (gate or act == "hard_sigmoid"):
        raise ValueError(
            "loka::linear_block_norm_act: out 'y8' has a static scale, and only the plain forms "
            "with act 'none' or 'hard_swish' are bounded"
        )


def _activate(v: Tensor, act: str) -> Tensor:
    if act == "hard_swish":
        return hs.hard_swish(v)
    return hs.hard_sigmoid(v) if act == "hard_sigmoid" else v


def _activate_grad(v: Tensor, act: str) -> Tensor | None:
    if act == "hard_swish":
        return hs.hard_swish_grad(v)
    return hs.hard_sigmoid_grad(v) if act == "hard_sigmoid" else None


def static_scale(gain: Tensor | None, block: int, device: torch.device) -> Tensor:
    """Scale of the e4m3 output: sqrt(block) * max|gain| / 448, fp32, no pass over the output.

    |u| <= sqrt(block) for any input, since a block's mean square is 1 (a little less with eps).
    """
    bound = torch.full((), float(block) ** 0.5 / FP8_MAX[_E4M3], device=device)
    if gain is None:
        return bound
    # The floor keeps a zero gain from dividing by zero; the scale handed over has it too.
    return (bound * gain.detach().abs().amax().to(torch.float32)).clamp(min=_LEAST_SCALE)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """z = x @ w.T;  u, r = BlockNorm(z);  y = act(gain * u), or z * act(gain * u) with `gate`.

    Returns y (..., N); y8, y_scale (e4m3 and its scale when out == "y8", else empty tensors);
    u (..., N) in x's dtype and r (..., blocks) in the wide dtype, which the backward needs.
    """
    check_epilogue(act, gate, out)
    with _exact_dtypes(x.device.type):
        if x8 is not None and x_scale is not None:
            # A producer's e4m3 output stands in for x; x itself then only carries the gradient.
            source = (x8.to(torch.float32) * x_scale).to(x.dtype)
        else:
            source = x
        z = gemm.forward(_rows(source), w, fwd)
        wide = bn.wide_dtype(x.dtype)
        u, r = bn.normalize(z, block, eps)
        v = u if gain is None else u * gain.to(wide)
        y = _activate(v, act)
        if gate:
            y = y * z.to(wide)
        if y is u:
            # Outputs of an op may not share memory: an in-place edit of y would reach the saved u.
            y = u.clone()
        lead, features = x.shape[:-1], w.shape[0]
        if out == "y8":
            y_scale = static_scale(gain, block, x.device)
            y8 = _fold(quantize_static(y, y_scale, _E4M3), lead, features)
        else:
            y_scale = torch.empty((0,), dtype=torch.float32, device=x.device)
            y8 = x.new_empty((0,))
        return (
            _fold(y.to(x.dtype), lead, features),
            y8,
            y_scale,
            _fold(u.to(x.dtype), lead, features),
            _fold(r, lead, r.shape[-1]),
        )


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
        ggain = _rows(g * u).sum(0).to(gain.dtype)
        g = g * gain.to(wide)
    gz = bn.normalize_backward(g, u, r, block)
    if direct is not None:
        gz = gz + direct
    return gz.to(gy.dtype).contiguous(), ggain
