"""The opaque ops of a fused chain, through the registered `loka::linear_block_norm_act`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch import nn

from loka_compile.kernels import block_norm as bn
from loka_compile.kernels import hard_swish as hs
from loka_compile.kernels import tiles
from loka_compile.kernels.quantize import quantize_tensorwise
from loka_compile.lowering import chain
from loka_compile.lowering import chain_formulas
from loka_compile.lowering import gemm
from loka_compile.lowering import ops
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION as HIGH

assert ops.LIBRARY is not None  # Imported for its registrations.
L = torch.ops.loka
EPS = 1e-5
E4M3 = torch.float8_e4m3fn
OWN = {
    "loka:tensorwise": ("loka:tensorwise", "torch:tensorwise", "torch:tensorwise"),
    "loka:rowwise": ("loka:rowwise", "torch:rowwise", "torch:rowwise"),
    "loka:blockwise": ("loka:blockwise", "torch:tensorwise", "torch:rowwise"),
}


def fused(
    x,
    w,
    kernels,
    out="y",
    act="hard_swish",
    gate=False,
    handed=(None,) * 3,
    save=True,
    gain=None,
    addend=None,
):
    x8, x_scale, x8t = handed
    return L.linear_block_norm_act(
        x, x8, x_scale, w, gain, 32, EPS, act, gate, *kernels, out, [], x8t, None, None, save,
        None, None, addend,
    )  # fmt: skip


def reference(x: Tensor, w: Tensor, act="hard_swish", gate=False, gain=None) -> Tensor:
    z = x @ w.t()
    u = bn.block_norm_ref(z, gain, 32, EPS)
    y = hs.hard_swish(u) if act == "hard_swish" else hs.hard_sigmoid(u)
    return z * y if gate else y


def make(device, m=48, k=64, n=96):
    x = torch.randn(m, k, device=device).requires_grad_()
    w = (torch.randn(n, k, device=device) / k**0.5).requires_grad_()
    return x, w


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("kernel", OWN)
@pytest.mark.parametrize(("act", "gate"), [("hard_swish", False), ("hard_sigmoid", True)])
def test_values_and_gradients(kernel, act, gate, device):
    x, w = make(device)
    gain = (1 + 0.3 * torch.randn(96, device=device)).requires_grad_()
    y = fused(x, w, OWN[kernel], act=act, gate=gate, gain=gain)[0]
    want = reference(x.double(), w.double(), act, gate, gain.double())
    # Two e4m3 operands; the gradients pass two more products of FP8 operands.
    assert relative(y, want) < 0.06
    gy = torch.randn_like(y)
    exact = torch.autograd.grad(want, (x, w, gain), gy.double())
    for mine, theirs in zip(torch.autograd.grad(y, (x, w, gain), gy), exact, strict=True):
        assert relative(mine, theirs) < 0.12


@pytest.mark.parametrize("kernel", OWN)
def test_the_same_bytes_as_the_steps_that_it_replaces(kernel, device):
    """The opaque kernel and its emulation quantise alike and round once."""
    x, w = make(device)
    own = fused(x, w, OWN[kernel])
    steps = fused(x, w, tuple(k + EMULATED for k in OWN[kernel]))
    torch.testing.assert_close(own[0], steps[0], rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(own[4], steps[4], rtol=1e-3, atol=0)


@pytest.mark.parametrize("m", [48, 37, 1])
def test_a_chain_of_two_hands_over_e4m3(m, device):
    """Consumer reads y8 and its transpose; y itself carries only the gradient."""
    x, w = make(device, m)
    _, v = make(device, m, k=96, n=64)
    y, y8, scale, _, _, y8t = fused(x, w, OWN["loka:tensorwise"], out="y8t")
    assert y8.dtype == E4M3 and y8t.shape == (96, chain.round_up(m))
    assert torch.equal(y8t[:, :m].float(), y8.float().t())
    z = fused(y, v, OWN["loka:tensorwise"], handed=(y8, scale, y8t))[0]
    want = reference(reference(x.double(), w.double()), v.double())
    assert relative(z, want) < 0.1
    gz = torch.randn_like(z)
    got = torch.autograd.grad(z, (x, w, v), gz)
    for mine, theirs in zip(got, torch.autograd.grad(want, (x, w, v), gz.double()), strict=True):
        assert relative(mine, theirs) < 0.25


def test_a_high_precision_wgrad_widens_what_was_handed(device):
    x, w = make(device)
    x8, scale = quantize_tensorwise(x.detach(), E4M3)
    kernels = ("loka:tensorwise", "torch:tensorwise", HIGH)
    y = fused(torch.full_like(x, float("nan")), w, kernels, handed=(x8, scale, None))[0]
    (gw,) = torch.autograd.grad(y.sum(), w)
    exact = (x8.double() * scale.double()).requires_grad_(False)
    want = torch.autograd.grad(reference(exact, w.double()).sum(), w)[0]
    assert relative(gw, want) < 0.06


def test_nothing_is_saved_without_a_backward(device):
    x, w = make(device)
    with torch.no_grad():
        _, _, _, u, r, _ = fused(x, w, OWN["loka:rowwise"], save=False)
    assert u.numel() == 0 and r.numel() == 0


def test_backward_rules_belong_to_our_own_forward():
    own, tensor, row = "loka:tensorwise", "torch:tensorwise", "torch:rowwise"
    assert chain.backward_rules(own, tensor, row) is not None
    assert chain.backward_rules(tensor, tensor, row) is None
    assert chain.backward_rules(own, HIGH, row) is None
    assert chain.backward_rules(own + EMULATED, tensor, row) is None
    # TorchAO scales are not powers of two: its own formula quantises.
    assert chain.backward_rules(own, "torchao:tensorwise", row) is None


def test_group_rules_ask_for_groups_that_cross_no_block():
    own, groups = "loka:rowwise", "deep_gemm:blockwise"
    assert chain.group_rules(own, groups, groups, 512, 256) is not None
    assert chain.group_rules(own, groups, "torch:blockwise", 96, 96) is not None
    assert chain.group_rules(own, groups, groups, 512, 160) is None
    assert chain.group_rules("torch:rowwise", groups, groups, 512, 256) is None
    # Of wgrad's operands that one has 128 x 128.
    assert chain.group_rules(own, groups, "torch:rowwise", 512, 256) is None
    assert chain.group_rules(own, groups, HIGH, 512, 256) is None
    assert chain.group_rules(own, groups + EMULATED, groups, 512, 256) is None


@pytest.mark.parametrize("with_gain", [False, True])
def test_a_backward_by_groups(with_gain, device, monkeypatch):
    """Both GEMMs read dL/dz with a scale per 128 values; here they are emulated on its operands."""
    monkeypatch.setattr(gemm, "_scaled", _emulated(gemm._scaled))
    x, w = make(device, m=150, k=64, n=256)
    gain = (1 + 0.3 * torch.randn(256, device=device)).requires_grad_() if with_gain else None
    kernels = ("loka:blockwise", "deep_gemm:blockwise", "deep_gemm:blockwise")
    y = L.linear_block_norm_act(
        x, None, None, w, gain, 128, EPS, "hard_swish", False, *kernels, "y", [], None, None, None,
        True, None, None, None,
    )[0]  # fmt: skip
    z = x.double() @ w.double().t()
    u = bn.block_norm_ref(z, None if gain is None else gain.double(), 128, EPS)
    want = hs.hard_swish(u)
    gy = torch.randn_like(y)
    leaves = (x, w) if gain is None else (x, w, gain)
    exact = torch.autograd.grad(want, leaves, gy.double())
    for mine, theirs in zip(torch.autograd.grad(y, leaves, gy), exact, strict=True):
        assert relative(mine, theirs) < 0.08


def _emulated(scaled):
    def call(a, b, direction, kernel, *rest):
        return scaled(a, b, direction, kernel + EMULATED, *rest)

    return call


def test_opcheck():
    x, w = make("cpu")
    a, a_scale = quantize_tensorwise(x.detach(), E4M3)
    b, b_scale = quantize_tensorwise(w.detach(), E4M3)
    scale = chain_formulas.static_scale(None, 32, torch.device("cpu"))
    rest = (None, 32, EPS, True, "hard_swish", False, True, torch.bfloat16)
    head = (a, a_scale, b, b_scale, None, *rest)
    gy, u, r = torch.randn(48, 96), torch.randn(48, 96), torch.rand(48, 3)
    back = (gy, u, r, None, 32, "hard_swish", False, True, E4M3, True, E4M3)
    # The harness cannot compare FP8 tensors in its other two tests.
    tests = ("test_faketensor", "test_autograd_registration")
    plain = (*head, None, True, False)
    torch.library.opcheck(torch.ops.loka.fused_chain.default, plain, test_utils=tests)
    added = (a, a_scale, b, b_scale, torch.randn(48, 96), *rest, None, True, False)
    torch.library.opcheck(torch.ops.loka.fused_chain.default, added, test_utils=tests)
    fp8 = (*head, scale, True, True)
    torch.library.opcheck(torch.ops.loka.fused_chain.default, fp8, test_utils=tests)
    torch.library.opcheck(torch.ops.loka.fused_chain_backward.default, back, test_utils=tests)
    gained = (gy, u, r, torch.rand(96), 96, "hard_swish", False, True, E4M3, True, E4M3)
    torch.library.opcheck(torch.ops.loka.fused_chain_backward.default, gained, test_utils=tests)
    groups = (gy, u, r[:, :1], torch.rand(96), 96, "hard_swish", False, E4M3, E4M3)
    op = torch.ops.loka.fused_chain_backward_groups.default
    torch.library.opcheck(op, groups, test_utils=tests)


@pytest.mark.parametrize("kernel", OWN)
@pytest.mark.parametrize("out", ["y", "y8", "y8t"])
def test_no_rows(kernel, out, device):
    """An empty batch has no maximum to scale by; shapes and zero gradients come all the same."""
    x, w = make(device, m=0)
    parts = fused(x, w, OWN[kernel], out=out)
    y, y8, _, u, r, y8t = parts
    assert y.shape == u.shape == (0, 96) and r.shape == (0, 3)
    assert out == "y" or y8.shape == (0, 96)
    assert out != "y8t" or y8t.shape == (96, 0)
    y.sum().backward()
    assert x.grad.shape == x.shape and not w.grad.any()


@pytest.mark.parametrize("kernel", [*OWN, "high"])
@pytest.mark.parametrize(("act", "out"), [("hard_swish", "y8t"), ("hard_sigmoid", "y")])
def test_an_addend_before_the_norm(kernel, act, out, device):
    """Values, and gradients of all three: the addend's is dL/dz."""
    x, w = make(device)
    addend = torch.randn(48, 96, device=device).requires_grad_()
    kernels = OWN.get(kernel, ("high_precision",) * 3)
    y, y8, y_scale, *_ = fused(x, w, kernels, act=act, out=out, addend=addend)
    exact = [t.detach().double().requires_grad_() for t in (x, w, addend)]
    z = exact[0] @ exact[1].t() + exact[2]
    v = bn.block_norm_ref(z, None, 32, EPS)
    want = hs.hard_swish(v) if act == "hard_swish" else hs.hard_sigmoid(v)
    if out != "y":
        # The op's y is not written then.
        assert relative(y8.float() * y_scale, want.detach()) < 0.06
    else:
        assert relative(y.detach(), want.detach()) < 0.06
    gy = torch.randn_like(want)
    want.backward(gy)
    y.backward(gy.float())
    for got, theirs in zip((x, w, addend), exact, strict=True):
        assert relative(got.grad, theirs.grad) < (1e-5 if kernel == "high" else 0.25)


def test_an_addend_without_gradient_keeps_the_fused_backward(device):
    """Nobody asks for dL/dz then: our backward kernel quantises it, and never writes it."""
    x, w = make(device)
    addend = torch.randn(48, 96, device=device)
    y, *_ = fused(x, w, OWN["loka:tensorwise"], addend=addend)
    y.sum().backward()
    other, same = (t.detach().requires_grad_() for t in (x, w))
    y, *_ = fused(other, same, OWN["loka:tensorwise"], addend=addend.clone().requires_grad_())
    y.sum().backward()
    assert relative(x.grad, other.grad) < 0.1 and relative(w.grad, same.grad) < 0.1


@pytest.mark.gpu
def test_what_a_split_forward_keeps_is_not_a_graphs(monkeypatch) -> None:
    """Its counters are made while a CUDA graph is warmed up, and live longer than that."""
    monkeypatch.setattr(tiles, "_COUNTERS", {})
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4096, 256), nn.LayerNorm(256), nn.SiLU()).cuda().bfloat16()
    rest = "torch:tensorwise"
    force = {"*": {"fwd": "loka:tensorwise", "dgrad": rest, "wgrad": rest}}
    options = {"mods": "on", "force": force, "mode": "reduce-overhead"}
    compiled = torch.compile(model, backend="loka", options=options)
    x = torch.randn(256, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found = []
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        # Gradients are results of a CUDA graph, too, and the next replay overwrites them.
        for leaf in (x, *model.parameters()):
            leaf.grad = None
        y = compiled(x)
        found.append(y.detach().clone())
        y.float().square().mean().backward()
    assert tiles._COUNTERS
    assert all(torch.equal(one, found[0]) for one in found)
