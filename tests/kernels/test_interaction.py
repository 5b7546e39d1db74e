"""The interaction kernels against plain torch: on a GPU compiled, else in Triton's interpreter.

Shapes are the least that reach a branch: sizes that are no power of two (n = 20, d = 24, k = 6,
m = 5), one sample, more samples than programs, no compression.
"""

from __future__ import annotations

import pytest
import torch

from loka_compile.kernels.interaction import interaction
from loka_compile.kernels.interaction import interaction_backward
from loka_compile.lowering.interaction import interaction_backward_ref
from loka_compile.lowering.interaction import interaction_ref

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: Triton's interpreter multiplies the bits of bf16.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
SHAPES = [(7, 20, 24, 6, 5), (1, 16, 16, 16, 16), (9, 32, 16, 8, 0)]


def operands(b: int, n: int, d: int, k: int, m: int, dtype: torch.dtype):
    torch.manual_seed(0)

    def made(*shape):
        return torch.randn(*shape, device=DEVICE).to(dtype)

    # As linears keep them: p is the transpose of a (k, n) weight.
    left = made(m, n) if m else None
    gc = made(b, m, d) if m else None
    return made(b, n, d), made(k, n).t(), left, made(b, n, k), gc


def near(got, want, dtype) -> None:
    scale = want.double().abs().amax().clamp_min(1e-30)
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert (got.double() - want.double()).abs().amax() <= 4 * step * scale


def wide(*tensors):
    return [t if t is None else t.double() for t in tensors]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_fp64(shape) -> None:
    dtype = DTYPE
    x, p, left, gfm, gc = operands(*shape, dtype)
    for got, want in zip(interaction(x, p, left), interaction_ref(*wide(x, p, left)), strict=True):
        assert got.shape == want.shape and got.dtype == dtype
        if want.numel():
            near(got, want, dtype)
    got = interaction_backward(gfm, gc, x, p, left)
    want = interaction_backward_ref(*wide(gfm, gc, x, p, left))
    for mine, theirs in zip(got, want, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == dtype
        if theirs.numel():
            near(mine, theirs, dtype)


def test_the_formula_is_the_gradient() -> None:
    x, p, left, gfm, gc = wide(*operands(5, 6, 7, 3, 4, torch.bfloat16))
    inputs = [t.clone().requires_grad_() for t in (x, p, left)]
    want = torch.autograd.grad(interaction_ref(*inputs), inputs, [gfm, gc])
    for mine, theirs in zip(interaction_backward_ref(gfm, gc, x, p, left), want, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_strange_rows_stay_in_their_sample() -> None:
    x, p, left, gfm, gc = operands(4, 20, 24, 6, 5, DTYPE)
    x[0] = 0
    x[1, 3, 2] = float("nan")
    x[2] *= 1e30
    fm, c = interaction(x, p, left)
    gx, gp, _ = interaction_backward(gfm, gc, x, p, left)
    assert (fm[0] == 0).all() and (c[0] == 0).all()
    assert fm[1].isnan().any() and c[1].isnan().any()
    assert fm[3].isfinite().all() and c[3].isfinite().all() and gx[3].isfinite().all()
    # A sum over samples shows what any of them held.
    assert gp.isnan().any()


def test_a_gradient_that_is_a_slice() -> None:
    """Of the `cat` that Wukong's layers end with: each sample dense, samples apart."""
    x, p, left, gfm, gc = operands(7, 20, 24, 6, 5, DTYPE)
    joined = torch.full((7, 9, 24), float("nan"), device=DEVICE, dtype=DTYPE)
    joined[:, 2:7] = gc
    got = interaction_backward(gfm, joined[:, 2:7], x, p, left)
    for mine, theirs in zip(got, interaction_backward(gfm, gc, x, p, left), strict=True):
        assert torch.equal(mine, theirs)


def test_no_samples() -> None:
    x, p, left, gfm, gc = operands(0, 16, 16, 4, 3, DTYPE)
    fm, c = interaction(x, p, left)
    assert fm.shape == (0, 16, 4) and c.shape == (0, 3, 16)
    _, gp, gl = interaction_backward(gfm, gc, x, p, left)
    assert (gp == 0).all() and (gl == 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(300, 128, 128, 32, 64), (1000, 64, 64, 24, 32)], ids=str)
def test_the_sizes_of_wukong(shape) -> None:
    x, p, left, gfm, gc = operands(*shape, torch.bfloat16)
    for got, want in zip(interaction(x, p, left), interaction_ref(*wide(x, p, left)), strict=True):
        near(got, want, torch.bfloat16)
    want = interaction_backward_ref(*wide(gfm, gc, x, p, left))
    for mine, theirs in zip(interaction_backward(gfm, gc, x, p, left), want, strict=True):
        near(mine, theirs, torch.bfloat16)
