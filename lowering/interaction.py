"""`loka::interaction`: the products of a factorisation machine and a linear compression, one op.

    interaction             x (B, n, d), p (n, k), left (m, n)? -> fm = x (x^T p), c = left x
    interaction_backward    their gradients

Opaque under Inductor; on a GPU one Triton kernel each way (`kernels/interaction.py`), elsewhere the
separate products. `passes/interaction.py` writes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.lowering import direct_calls
from loka_compile.lowering.library import LIBRARY

LIBRARY.define("interaction(Tensor x, Tensor p, Tensor? left) -> (Tensor fm, Tensor c)")
LIBRARY.define(
    "interaction_backward(Tensor? gfm, Tensor? gc, Tensor x, Tensor p, Tensor? left) "
    "-> (Tensor gx, Tensor gp, Tensor gl)"
)
INTERACTION = torch.ops.loka.interaction.default

#: A sample and its products lie in one program: n, d, m up to this, k up to half of it.
WIDEST = 128
DTYPES = (torch.bfloat16, torch.float16)


def why_not(n: int, d: int, k: int, m: int, dtype: torch.dtype) -> str | None:
    """Why the kernels do not take these sizes; None when they do. m = 0: no compression."""
    if dtype not in DTYPES:
        return f"{dtype} products: the kernel holds 16-bit samples only"
    if max(n, d, m) > WIDEST or k > WIDEST // 2:
        return (
            f"a sample of {n} x {d} with rank {k} and {m} outputs: one program holds {WIDEST} x "
            f"{WIDEST}, rank {WIDEST // 2} and {WIDEST} outputs"
        )
    return None


@_compat.register_fake("loka::interaction", LIBRARY)
def _(x, p, left):
    b, n, d = x.shape
    c = x.new_empty((0,)) if left is None else x.new_empty((b, left.shape[0], d))
    return x.new_empty((b, n, p.shape[1])), c


@_compat.register_fake("loka::interaction_backward", LIBRARY)
def _(gfm, gc, x, p, left):
    gl = x.new_empty((0,)) if left is None else left.new_empty(left.shape)
    return x.new_empty(x.shape), p.new_empty(p.shape), gl


def _filled(
    gfm: Tensor | None, gc: Tensor | None, x: Tensor, p: Tensor, left: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of results that nobody read are zero; every sample of them is dense."""
    b, n, d = x.shape
    gfm = x.new_zeros((b, n, p.shape[1])) if gfm is None else gfm.contiguous()
    if left is not None:
        if gc is None:
            gc = x.new_zeros((b, left.shape[0], d))
        elif gc.stride()[1:] != (d, 1):
            gc = gc.contiguous()
    return gfm, gc


def interaction_ref(x: Tensor, p: Tensor, left: Tensor | None) -> tuple[Tensor, Tensor]:
    """As separate products, in the dtype of x: what CPU runs, and what the kernel is tested by."""
    fm = torch.bmm(x, x.transpose(1, 2) @ p)
    return fm, x.new_empty((0,)) if left is None else (left @ x).contiguous()


def interaction_backward_ref(
    gfm: Tensor | None, gc: Tensor | None, x: Tensor, p: Tensor, left: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(gx, gp, gl) as separate products."""
    gfm, gc = _filled(gfm, gc, x, p, left)
    turned = x.transpose(1, 2)
    t, gt = turned @ p, turned @ gfm
    gx = gfm @ t.transpose(1, 2) + p @ gt.transpose(1, 2)
    gp = torch.einsum("bnd,bdk->nk", x, gt).contiguous()
    if left is None or gc is None:
        return gx.contiguous(), gp, x.new_empty((0,))
    gl = torch.einsum("bmd,bnd->mn", gc, x).contiguous()
    return (gx + left.t() @ gc).contiguous(), gp, gl


@functools.cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Imported late: the package must import where Triton is missing."""
    from loka_compile.kernels.interaction import interaction
    from loka_compile.kernels.interaction import interaction_backward

    return interaction, interaction_backward


def _forward_cuda(x: Tensor, p: Tensor, left: Tensor | None) -> tuple[Tensor, Tensor]:
    return _kernels()[0](x.contiguous(), p, left)


def _backward_cuda(
    gfm: Tensor | None, gc: Tensor | None, x: Tensor, p: Tensor, left: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    gfm, gc = _filled(gfm, gc, x, p, left)
    return _kernels()[1](gfm, gc, x.contiguous(), p, left)


LIBRARY.impl("interaction", interaction_ref, "CPU")
LIBRARY.impl("interaction_backward", interaction_backward_ref, "CPU")
LIBRARY.impl("interaction", _forward_cuda, "CUDA")
direct_calls.register("interaction", checked=False, cuda=_forward_cuda, cpu=interaction_ref)
LIBRARY.impl("interaction_backward", _backward_cuda, "CUDA")
direct_calls.register(
    "interaction_backward", checked=False, cuda=_backward_cuda, cpu=interaction_backward_ref
)


def _setup(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _backward(ctx, gfm, gc):
    x, p, left = ctx.saved_tensors
    if gfm is None and (gc is None or left is None):
        return None, None, None
    gc = None if left is None else gc
    gx, gp, gl = torch.ops.loka.interaction_backward(gfm, gc, x, p, left)
    return gx, gp, (None if left is None else gl)


torch.library.register_autograd("loka::interaction", _backward, setup_context=_setup, lib=LIBRARY)


def _no_second_order(ctx, *grads):
    from loka_compile.errors import DoubleBackwardError

    raise DoubleBackwardError("loka::interaction_backward")


torch.library.register_autograd("loka::interaction_backward", _no_second_order, lib=LIBRARY)
