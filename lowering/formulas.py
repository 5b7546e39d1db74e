"""What each `loka::` op computes, in plain aten: the eager kernel and the decomposition at once.

Linears and BlockNorm on their own; the fused chain is in `chain_formulas.py`.

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
from loka_compile.lowering import gemm
from loka_compile.lowering import meters
from loka_compile.lowering.recipes import HIGH_PRECISION


def as_rows(t: Tensor) -> Tensor:
    """(..., C) -> (M, C); 1-D counts as one row. A matrix stays: of (R, 0) nobody could say R."""
    return t if t.dim() == 2 else t.reshape(-1, t.shape[-1])


def fold(t: Tensor, lead: torch.Size, features: int) -> Tensor:
    """Dense (M, C) -> (*lead, C), not marked as a view: autograd refuses in-place edits of a custom
    op's outputs that are views (`nn.ReLU(inplace=True)` after a linear)."""
    return torch.ops.aten._unsafe_view.default(t, [*lead, features])


class exact_dtypes:
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
    x8: Tensor | None = None,
    x_scale: Tensor | None = None,
    x8t: Tensor | None = None,
    w8: Tensor | None = None,
    w_scale: Tensor | None = None,
    w8t: Tensor | None = None,
    wt_scale: Tensor | None = None,
) -> Tensor:
    """x8, x_scale (x8t: its transpose): x as a producer handed it over; w8, w_scale: w quantised
    already; w8t, wt_scale: for dgrad, which alone reads them."""
    with exact_dtypes(x.device.type):
        rows = as_rows(x)
        if bias is not None and fwd == HIGH_PRECISION:
            y = torch.addmm(bias, rows, w.t())
        else:
            ready = (pair_of(x8, x_scale), pair_of(w8, w_scale))
            y = gemm.forward(rows, w, fwd, ready=ready, cells=meters.cells_of(probe))
            if bias is not None:
                y = y + bias
        return fold(y, x.shape[:-1], w.shape[0])


def pair_of(q: Tensor | None, scale: Tensor | None) -> gemm.Quantized | None:
    return None if q is None or scale is None else (as_rows(q), scale)


def linear_dgrad(
    gy: Tensor,
    w: Tensor,
    kernel: str,
    gy8: Tensor | None = None,
    gy_scale: Tensor | None = None,
    w8t: Tensor | None = None,
    wt_scale: Tensor | None = None,
    cells: Tensor | None = None,
) -> Tensor:
    """gy8 (M, N), gy_scale: the gradient quantised already; gy then only gives shape and dtype.
    w8t (K, N), wt_scale: the same for w. cells: see `meters.py`."""
    with exact_dtypes(gy.device.type):
        ready = (pair_of(gy8, gy_scale), pair_of(w8t, wt_scale))
        gx = gemm.dgrad(as_rows(gy), w, kernel, ready=ready, cells=cells)
        return fold(gx, gy.shape[:-1], w.shape[1])


def linear_wgrad(
    gy: Tensor,
    x: Tensor | None,
    kernel: str,
    gy8t: Tensor | None = None,
    gyt_scale: Tensor | None = None,
    x8t: Tensor | None = None,
    x_scale: Tensor | None = None,
    cells: Tensor | None = None,
) -> Tensor:
    """gy8t (N, M up to 16) and x8t (K, M up to 16): operands that are quantised already, with
    zeros behind M. What they stand for is not read; without x its dtype is gy's."""
    with exact_dtypes(gy.device.type):
        rows = as_rows(gy)
        if x is None:
            assert x8t is not None
            # Only its shape and dtype are read.
            x = gy.new_empty((rows.shape[0], x8t.shape[0]))
        ready = (pair_of(gy8t, gyt_scale), pair_of(x8t, x_scale))
        return gemm.wgrad(rows, as_rows(x), kernel, ready=ready, cells=cells)


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
        ggain = as_rows(g * u).sum(0).to(gain.dtype)
        g = g * gain.to(wide)
    return bn.normalize_backward(g, u, r, block).to(x.dtype).contiguous(), ggain
