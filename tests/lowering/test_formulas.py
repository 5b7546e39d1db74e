"""The formulas behind the ops: values, closed-form gradients, hand-over in FP8, odd inputs."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loka_compile.kernels import block_norm as bn
from loka_compile.lowering import chain_formulas
from loka_compile.lowering import formulas
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION as HIGH

# Norm of a gradient's error over its norm, FP8 kernels against the closed form in FP64: operand
# rounding as in test_gemm.py (3.7 % for two e4m3 operands, 5.9 % with one in e5m2), plus what the
# forward's own error of 3.7 % does to u and to the activation's slope. x and g carry two GEMMs.
TOLERANCE = {
    "torch:rowwise": 0.09,
    "torch:tensorwise": 0.12,
    "torchao:rowwise": 0.09,
    "torchao:tensorwise": 0.12,
    "torchao:rowwise_with_gw_hp": 0.09,
}
EPILOGUES = [
    (act, gate) for act, gate in itertools.product(chain_formulas.ACTIVATIONS, (False, True))
]
EPILOGUE = pytest.mark.parametrize(("act", "gate"), EPILOGUES)
EPS = 1e-5
K, N = 32, 48


def reference(x, w, gain, block, act, gate, eps=EPS) -> Tensor:
    """Spelled with PyTorch's own functions and the block-by-block norm, for autograd."""
    z = F.linear(x, w)
    v = bn.block_norm_ref(z, gain, block, eps)
    # Written out: PyTorch's own have an FP32 sixth in FP64 (on CUDA, and in every backward).
    sixth = (v + 3).clamp(0, 6) / 6
    a = {"none": v, "hard_swish": v * sixth, "hard_sigmoid": sixth}[act]
    return z * a if gate else a


def fused(x, w, gain=None, block=16, act="none", gate=False, kernels=(HIGH,) * 3, out="y", **more):
    return chain_formulas.linear_block_norm_act(
        x, more.get("x8"), more.get("x_scale"), w, gain, block, EPS, act, gate, *kernels, out, []
    )


def gradients(x, w, gain, gy, block, act, gate, kernels) -> tuple[Tensor, ...]:
    """(gx, gw, ggain), composed of the formulas as the registered autograd composes them."""
    _, _, _, u, r, _ = fused(x, w, gain, block, act, gate, kernels)
    gz, ggain = chain_formulas.block_norm_act_backward(gy, u, r, gain, block, act, gate)
    gx = formulas.linear_dgrad(gz, w, kernels[1])
    return gx, formulas.linear_wgrad(gz, x, kernels[2]), ggain


def make(dtype=torch.float64, device="cpu", m=9) -> tuple[Tensor, ...]:
    x = torch.randn(m, K, device=device).to(dtype)
    w = (torch.randn(N, K, device=device) / K**0.5).to(dtype)
    gain = (1 + 0.3 * torch.randn(N, device=device)).to(dtype)
    return x, w, gain, torch.randn(m, N, device=device).to(dtype)


@EPILOGUE
# 16 divides 48; 20 leaves a ragged block of 8; 1 and 48 are the ends.
@pytest.mark.parametrize("block", [1, 16, 20, 48])
@pytest.mark.parametrize("with_gain", [False, True])
def test_closed_form_equals_autograd(act, gate, block, with_gain, device):
    x, w, gain, gy = make(device=device)
    gain = gain if with_gain else None
    leaves = [t.clone().requires_grad_() for t in (x, w, gain) if t is not None]
    want_y = reference(leaves[0], leaves[1], leaves[2] if with_gain else None, block, act, gate)
    want = torch.autograd.grad(want_y, leaves, gy)
    y = fused(x, w, gain, block, act, gate)[0]
    torch.testing.assert_close(y, want_y.detach(), rtol=1e-12, atol=1e-12)
    got = gradients(x, w, gain, gy, block, act, gate, (HIGH,) * 3)
    for a, b in zip(got, want, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    if not with_gain:
        assert got[2].numel() == 0


@EPILOGUE
@pytest.mark.parametrize("kernel", list(TOLERANCE))
def test_fp8_gradients_agree_with_the_closed_form(act, gate, kernel):
    # 65 rows: enough for errors to average, no multiple of anything.
    x, w, gain, gy = make(m=65)
    want = gradients(x, w, gain, gy, 16, act, gate, (HIGH,) * 3)
    x, w, gain, gy = (t.bfloat16() for t in (x, w, gain, gy))
    got = gradients(x, w, gain, gy, 16, act, gate, (kernel + EMULATED,) * 3)
    for name, a, b in zip(("x", "w", "gain"), got, want, strict=True):
        error = float((a.double() - b).norm() / b.norm())
        assert error < TOLERANCE[kernel], (name, error)
        assert error > 1e-4, "not an FP8 result"


@pytest.mark.parametrize("kernel", [HIGH, "torch:rowwise" + EMULATED])
def test_linear_with_bias_and_any_rank(kernel, device):
    x, w, gain, _ = make(torch.float32, device, m=24)
    want = formulas.linear(x, w, gain, kernel, kernel, kernel, [])
    plain = F.linear(x.double(), w.double(), gain.double())
    assert float((want.double() - plain).norm() / plain.norm()) < (1e-6 if kernel == HIGH else 0.05)
    for lead in ((24,), (4, 6), (2, 3, 4)):
        got = formulas.linear(x.reshape(*lead, K), w, gain, kernel, kernel, kernel, [])
        torch.testing.assert_close(got, want.reshape(*lead, N))
    one = formulas.linear(x[0], w, gain, kernel, kernel, kernel, [])
    torch.testing.assert_close(one, want[0], rtol=1e-5, atol=1e-5)


def test_views_and_slices(device):
    """FBGEMM 3505, vllm 44712: permuted and sliced inputs of up to four dimensions."""
    kernel = "torch:rowwise" + EMULATED
    full = torch.randn(4, 6, 5, K, device=device)
    w = torch.randn(N, K, device=device)
    for x in (full.transpose(1, 2), full[:, 2:], full[..., 1:, :], full.permute(2, 1, 0, 3)):
        got = formulas.linear(x, w, None, kernel, kernel, kernel, [])
        want = formulas.linear(x.contiguous(), w, None, kernel, kernel, kernel, [])
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("kernel", [HIGH, "torch:rowwise+emulated", "torchao:tensorwise+emulated"])
def test_empty_batch(lead, kernel, device):
    x = torch.zeros(*lead, K, device=device)
    w = torch.randn(N, K, device=device)
    gain = torch.ones(N, device=device)
    y, y8, y_scale, u, r, _ = fused(x, w, gain, 16, "hard_swish", kernels=(kernel,) * 3, out="y8")
    assert y.shape == u.shape == y8.shape == (*lead, N) and r.shape == (*lead, 3)
    assert torch.isfinite(y_scale)
    gx, gw, ggain = gradients(x, w, gain, y, 16, "hard_swish", False, (kernel,) * 3)
    assert gx.shape == x.shape and (gw == 0).all() and (ggain == 0).all()


@pytest.mark.parametrize("act", ["none", "hard_swish"])
@pytest.mark.parametrize("block", [16, 20])
@pytest.mark.parametrize("with_gain", [False, True])
def test_static_scale_holds(act, block, with_gain, device):
    """One-hot rows drive u to sqrt(block): y8 never saturates beyond y, and equals y to e4m3."""
    _, _, gain, _ = make(torch.float32, device)
    # Negative throughout: the bound is by magnitude.
    gain = -5 * gain.abs() if with_gain else None
    w = torch.eye(N, device=device)
    x = torch.cat(
        [
            1e4 * torch.eye(N, device=device),
            -1e4 * torch.eye(N, device=device),
            torch.randn(40, N, device=device),
            torch.zeros(2, N, device=device),
        ]
    )
    y, y8, scale, u, _, _ = fused(x, w, gain, block, act, out="y8")
    assert y8.dtype == torch.float8_e4m3fn and scale.shape == () and scale.dtype == torch.float32
    bound = block**0.5 * (1.0 if gain is None else float(gain.abs().max()))
    assert scale.item() == pytest.approx(bound / 448, rel=1e-6)
    assert float(u.abs().max()) > 0.999 * block**0.5  # the bound is met, not just kept
    assert float(y.abs().max()) <= 448 * scale.item() * (1 + 1e-6)
    # Half a step of e4m3, 2**-4 of the value; below 2**-6 its steps are 2**-9 of the scale.
    torch.testing.assert_close(y8.float() * scale, y, rtol=2**-4, atol=2**-10 * scale.item())


def test_static_scale_of_a_zero_gain(device):
    x, w, gain, _ = make(torch.float32, device)
    for value in (0.0, 1e-36):
        y, y8, scale, _, _, _ = fused(x, w, torch.full_like(gain, value), 16, "none", out="y8")
        assert scale.item() > 0
        back = y8.float() * scale
        assert torch.isfinite(back).all()
        torch.testing.assert_close(back, y, rtol=0, atol=1e-30)


def test_the_fp8_operand_is_read(device):
    x, w, gain, _ = make(torch.float32, device)
    scale = torch.tensor(0.01, device=device)
    x8 = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    want = fused((x8.float() * scale), w, gain)[0]
    # x itself says nothing any more: it only carries the gradient.
    got = fused(torch.full_like(x, float("nan")), w, gain, x8=x8, x_scale=scale)[0]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    z = fused(x, w, gain, 16, "none", True, x8=x8, x_scale=scale)[0]
    doubled = fused(x, w, gain, 16, "none", True, x8=x8, x_scale=2 * scale)[0]
    torch.testing.assert_close(doubled, 2 * z, rtol=1e-3, atol=1e-3)


def test_half_precision_statistics_are_fp32(device):
    """nntrainer 3935, through the fused op: u is finite where FP16 squares are not."""
    x = (300 * torch.randn(8, 64, device=device)).half()
    w = torch.eye(64, device=device).half()
    y, _, _, u, r, _ = fused(x, w, None, 64)
    assert r.dtype == torch.float32 and torch.isfinite(y).all()
    want = bn.block_norm_ref(x.float(), None, 64, EPS)
    torch.testing.assert_close(u.float(), want, rtol=2e-3, atol=1e-4)


def test_outputs_share_no_memory(device):
    x, w, gain, _ = make(torch.float32, device)
    for act, gate in EPILOGUES:
        for g in (None, gain):
            out = [t for t in fused(x, w, g, 16, act, gate) if t.numel()]
            storages = {t.untyped_storage().data_ptr() for t in out}
            assert len(storages) == len(out), (act, gate)


def test_results_are_dense(device):
    """A norm's output can be viewed; results that kept x's strides could not."""
    x = torch.randn(4, 6, 64, device=device).transpose(0, 1)
    y, r = formulas.block_norm(x, None, 16, EPS)
    assert y.is_contiguous() and r.is_contiguous()
    gx, _ = formulas.block_norm_backward(x, x, r, None, 16)
    assert gx.is_contiguous()


@pytest.mark.parametrize(
    ("act", "gate", "out"),
    [
        ("relu6", False, "y"),
        ("none", False, "y9"),
        ("none", True, "y8"),
        ("hard_sigmoid", False, "y8"),
    ],
)
def test_bad_epilogues_are_refused(act, gate, out):
    x, w, gain, _ = make(torch.float32)
    with pytest.raises(ValueError, match="loka::linear_block_norm_act"):
        fused(x, w, gain, 16, act, gate, out=out)


def test_autocast_does_not_reach_the_casts(device):
    x, w, gain, _ = make(torch.float32, device)
    want = fused(x, w, gain, 16, "hard_swish", kernels=("torch:rowwise" + EMULATED,) * 3)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = fused(x, w, gain, 16, "hard_swish", kernels=("torch:rowwise" + EMULATED,) * 3)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
