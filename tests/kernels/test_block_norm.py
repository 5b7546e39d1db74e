"""BlockNorm against its block-by-block definition, forward and backward, and its block rule."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from loka_compile.kernels import block_norm as bn

# 40 features: whole blocks (8, 20), a ragged last one (16, 24), single features, the row, wider.
BLOCKS = pytest.mark.parametrize("block", [1, 8, 16, 20, 24, 40, 64])
EPS = 1e-5


def _fast(x, gain, block, eps=EPS):
    u, _ = bn.normalize(x, block, eps)
    return (u if gain is None else u * gain.to(u.dtype)).to(x.dtype)


@pytest.mark.parametrize(
    ("features", "want"),
    [(1, 1), (160, 160), (256, 256), (257, 256), (384, 128), (512, 256), (640, 128), (1000, 256)],
)
def test_block_rule(features, want):
    assert bn.block_of(features) == want


@BLOCKS
@pytest.mark.parametrize("lead", [(), (0,), (1,), (7,), (2, 3), (2, 3, 4)], ids=str)
def test_forward_equals_definition(block, lead, device):
    x = torch.randn(*lead, 40, dtype=torch.float64, device=device)
    gain = torch.randn(40, dtype=torch.float64, device=device)
    for g in (None, gain):
        torch.testing.assert_close(
            _fast(x, g, block), bn.block_norm_ref(x, g, block, EPS), rtol=1e-13, atol=1e-13
        )
    u, r = bn.normalize(x, block, EPS)
    assert r.shape == (*lead, bn.count_blocks(40, block))
    assert u.dtype == r.dtype == torch.float64


@BLOCKS
def test_backward_equals_autograd_of_the_definition(block, device):
    x = torch.randn(5, 40, dtype=torch.float64, device=device, requires_grad=True)
    g = torch.randn(5, 40, dtype=torch.float64, device=device)
    (want,) = torch.autograd.grad(bn.block_norm_ref(x, None, block, EPS), x, g)
    u, r = bn.normalize(x.detach(), block, EPS)
    got = bn.normalize_backward(g, u, r, block)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_one_block_is_rms_norm(device):
    x = torch.randn(6, 32, device=device)
    gain = torch.randn(32, device=device)
    torch.testing.assert_close(_fast(x, gain, 32), F.rms_norm(x, (32,), gain, EPS))


def test_ragged_block_has_its_own_width(device):
    """Hand value: the tail of 2 features is divided by 2, not by the block width of 3."""
    x = torch.tensor([[3.0, 0.0, 4.0, 6.0, 8.0]], dtype=torch.float64, device=device)
    u, r = bn.normalize(x, 3, 0.0)
    want = [(25 / 3) ** -0.5, 50**-0.5]
    torch.testing.assert_close(r, torch.tensor([want], dtype=torch.float64, device=device))
    assert u[0, 3].item() == pytest.approx(6 / 50**0.5)


def test_eps_is_inside_the_root(device):
    x = torch.full((1, 4), 1e-3, dtype=torch.float64, device=device)
    for eps in (1e-2, 1e-5, 1e-6):
        _, r = bn.normalize(x, 4, eps)
        assert r.item() == pytest.approx((1e-6 + eps) ** -0.5, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_zero_rows_give_zeros_and_finite_gradients(dtype, device):
    x = torch.zeros(3, 40, dtype=dtype, device=device)
    u, r = bn.normalize(x, 16, EPS)
    assert (u == 0).all() and torch.isfinite(r).all()
    gx = bn.normalize_backward(torch.ones_like(u), u, r, 16)
    assert torch.isfinite(gx).all()


def test_half_precision_squares_do_not_overflow(device):
    """nntrainer 3935: the sum of squares of 300 * randn in FP16 is inf."""
    x = (300 * torch.randn(8, 2048, device=device)).half()
    assert x.pow(2).sum().isinf()  # the trap is real
    got = _fast(x, None, 256)
    want = bn.block_norm_ref(x.double(), None, 256, EPS)
    assert got.dtype == torch.float16
    # One rounding to FP16: half a step, 2**-11 relative.
    torch.testing.assert_close(got.double(), want, rtol=2**-10, atol=1e-6)


def test_normalised_value_is_bounded(device):
    """|u| <= sqrt(block), met by one-hot rows: what the static FP8 scale rests on."""
    for block in (8, 16, 40):
        x = 1e6 * torch.eye(40, device=device)
        u, _ = bn.normalize(x, block, EPS)
        assert u.max().item() <= block**0.5 * (1 + 1e-6)
        assert u[0, 0].item() == pytest.approx(block**0.5, rel=1e-6)


@pytest.mark.parametrize("block", [8, 16])
def test_block_mean_and_spread_round_trip(block, device):
    per = torch.arange(bn.count_blocks(40, block), dtype=torch.float32, device=device)
    wide = bn.spread(per.expand(3, -1), 40, block)
    assert wide.shape == (3, 40)
    assert wide[0].tolist() == [float(i // block) for i in range(40)]
    torch.testing.assert_close(bn.block_mean(wide, block), per.expand(3, -1))


@pytest.mark.slow
@pytest.mark.parametrize(("features", "block"), [(40, 24), (300, 256)])
def test_inductor_agrees_on_ragged_blocks(features, block, device):
    """torch 2.13's CPU code read past its buffer where `spread` was a slice of a long expansion."""

    def both(x, gain, g):
        u, r = bn.normalize(x, block, EPS)
        return u * gain, r, bn.normalize_backward(g, u, r, block)

    args = [torch.randn(9, features, device=device) for _ in range(3)]
    for got, want in zip(torch.compile(both, dynamic=False)(*args), both(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
