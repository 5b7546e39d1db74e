"""The registered ops: schema, fakes, autograd, and what autograd may not do."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from loka_compile.errors import DoubleBackwardError
from loka_compile.lowering import chain_formulas
from loka_compile.lowering import ops
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION as HIGH
from loka_compile.probe.places import Places
from loka_compile.probe.statistics import Statistics
from tests.helpers.observed import probe_of

L = torch.ops.loka
EPS = 1e-5
ROW = "torch:rowwise" + EMULATED
# gradcheck costs two forwards per input element: 3 x 16 and 8 x 16 elements are enough for a block
# of 4, a ragged one (5) and the whole row.
M, K, N = 3, 16, 8
#: No operand comes quantised already.
NONE_READY = (None,) * 7
NO_MORE = (None, None, None, True, None, None, None)


def make(device, dtype=torch.float64, m=M, k=K, n=N, grad=True) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(m, k, device=device, dtype=dtype)
    w = torch.randn(n, k, device=device, dtype=dtype) / k**0.5
    gain = 1 + 0.3 * torch.randn(n, device=device, dtype=dtype)
    return tuple(t.requires_grad_(grad) for t in (x, w, gain))


def fused(x, w, gain, block=4, act="none", gate=False, kernels=(HIGH,) * 3, out="y", probe=()):
    return L.linear_block_norm_act(
        x, None, None, w, gain, block, EPS, act, gate, *kernels, out, list(probe), *NO_MORE
    )


def linear(x, w, bias, *kernels_and_probe) -> Tensor:
    return L.linear(x, w, bias, *kernels_and_probe, *NONE_READY)


@pytest.mark.parametrize("with_bias", [False, True])
def test_gradcheck_linear(with_bias, device):
    x, w, bias = make(device)
    args = (x, w, bias) if with_bias else (x, w)
    torch.autograd.gradcheck(lambda x, w, b=None: linear(x, w, b, HIGH, HIGH, HIGH, []), args)


@pytest.mark.parametrize("block", [1, 4, 5, 8])
@pytest.mark.parametrize("with_gain", [False, True])
def test_gradcheck_block_norm(block, with_gain, device):
    _, x, gain = make(device)
    x = x[:, :N].detach().requires_grad_()
    args = (x, gain) if with_gain else (x,)
    torch.autograd.gradcheck(lambda x, g=None: L.block_norm(x, g, block, EPS)[0], args)


@pytest.mark.parametrize(
    ("act", "gate"), list(itertools.product(chain_formulas.ACTIVATIONS, (False, True)))
)
@pytest.mark.parametrize("block", [4, 5, 8])
@pytest.mark.parametrize("with_gain", [False, True])
def test_gradcheck_fused(act, gate, block, with_gain, device):
    x, w, gain = make(device)
    args = (x, w, gain) if with_gain else (x, w)
    torch.autograd.gradcheck(
        lambda x, w, g=None: fused(x, w, g, block, act, gate)[0], args, fast_mode=True
    )


def _opcheck_cases() -> dict[str, tuple]:
    x, w, gain = make("cpu", torch.float32, k=16, n=16)
    gy = torch.randn(M, 16)
    r = torch.rand(M, 4)
    row = (ROW,) * 3
    wide = torch.randn(2, 4, 16).transpose(0, 1).requires_grad_()
    return {
        "linear": (L.linear, (x, w, gain, *row, [], *NONE_READY)),
        "linear_no_bias_3d": (L.linear, (wide, w, None, *row, [], *NONE_READY)),
        "linear_dgrad": (L.linear_dgrad, (gy, w.detach(), ROW, *((None,) * 4))),
        "linear_wgrad": (L.linear_wgrad, (gy, x.detach(), ROW, *((None,) * 4))),
        "block_norm": (L.block_norm, (x, gain, 4, EPS)),
        "block_norm_permuted": (L.block_norm, (wide, None, 4, EPS)),
        "block_norm_backward": (L.block_norm_backward, (gy, x.detach(), r, gain.detach(), 4)),
        "fused": (
            L.linear_block_norm_act,
            (x, None, None, w, gain, 4, EPS, "hard_swish", False, *row, "y", [], *NO_MORE),
        ),
        "fused_plain": (
            L.linear_block_norm_act,
            (x, None, None, w, None, 4, EPS, "none", False, *row, "y", [], *NO_MORE),
        ),
        "fused_gate_bf16": (
            L.linear_block_norm_act,
            (
                *(t if t is None else t.detach().bfloat16() for t in (x, None, None, w, None)),
                5,
                EPS,
                "hard_sigmoid",
                True,
                *row,
                "y",
                [],
                *NO_MORE,
            ),
        ),
        "fused_backward": (
            L.block_norm_act_backward,
            (gy, x.detach(), r, gain.detach(), 4, "hard_swish", False),
        ),
    }


@pytest.mark.parametrize("case", list(_opcheck_cases()))
def test_opcheck(case):
    op, args = _opcheck_cases()[case]
    torch.library.opcheck(op.default, args)


def test_opcheck_fp8_output():
    """The harness sums outputs, which FP8 tensors cannot: without its last test."""
    x, w, gain = make("cpu", torch.float32, k=16, n=16)
    torch.library.opcheck(
        L.linear_block_norm_act.default,
        (x, None, None, w, gain, 4, EPS, "hard_swish", False, ROW, ROW, ROW, "y8", [], *NO_MORE),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_every_op_has_a_decomposition_and_a_case():
    names = {str(op).split(".")[1] for op in ops.decompositions()}
    tested = {str(op.default).split(".")[1] for op, _ in _opcheck_cases().values()}
    assert names == tested


@pytest.mark.parametrize("kernel", [HIGH, ROW, "torch:tensorwise" + EMULATED])
def test_stride_zero_and_permuted_gradients(kernel, device):
    """ROCm TE 623, ao 4470: what `sum()` and a transposed consumer send back."""
    x, w, gain = make(device, torch.float32, m=17, k=32, n=16)
    for op in (
        lambda: linear(x, w, None, kernel, kernel, kernel, []),
        lambda: fused(x, w, gain, 4, "hard_swish", kernels=(kernel,) * 3)[0],
        lambda: L.block_norm(x, None, 4, EPS)[0],
    ):
        leaves = [x, w] if op().shape[1] == 16 else [x]
        y = op()
        dense = torch.randn(*reversed(y.shape), device=device)
        for consume, g in ((y.sum(), torch.ones_like(y)), ((y.t() * dense).sum(), dense.t())):
            got = torch.autograd.grad(consume, leaves, retain_graph=True)
            want = torch.autograd.grad(y, leaves, g.contiguous(), retain_graph=True)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "shape", [(16,), (5, 16), (2, 3, 16), (2, 3, 2, 16), (0, 16), (2, 0, 16)], ids=str
)
@pytest.mark.parametrize("kernel", [HIGH, ROW])
def test_any_rank_forward_and_backward(shape, kernel, device):
    _, w, gain = make(device, torch.float32, n=16)
    x = torch.randn(*shape, device=device, requires_grad=True)
    for y in (
        linear(x, w, gain, kernel, kernel, kernel, []),
        fused(x, w, gain, 4, "hard_swish", kernels=(kernel,) * 3)[0],
        L.block_norm(x, gain, 4, EPS)[0],
    ):
        assert y.shape == (*shape[:-1], 16)
        gx, ggain = torch.autograd.grad(y.sum(), (x, gain))
        assert gx.shape == shape and ggain.shape == (16,)
        assert torch.isfinite(gx).all() and torch.isfinite(ggain).all()


def test_zero_weight_still_gets_a_gradient(device):
    """ao 3356: a second matrix that starts at zero."""
    x = torch.randn(17, 32, device=device)
    w = torch.zeros(16, 32, device=device, requires_grad=True)
    for kernel in (ROW, "torch:tensorwise" + EMULATED, "torchao:rowwise" + EMULATED):
        (gw,) = torch.autograd.grad(linear(x, w, None, kernel, kernel, kernel, []).sum(), w)
        assert torch.isfinite(gw).all() and (gw != 0).any()


def test_second_order_gradients_are_refused(device):
    """pytorch 91469: an error, never zeros."""
    x, w, gain = make(device)
    for y in (
        linear(x, w, None, HIGH, HIGH, HIGH, []),
        L.block_norm(x, gain.repeat(2), 4, EPS)[0],
        fused(x, w, gain)[0],
    ):
        (gx,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        with pytest.raises(DoubleBackwardError, match="second-order"):
            gx.sum().backward()


def test_only_what_is_asked_is_computed(device):
    x, w, gain = make(device)
    x.requires_grad_(False)
    y = fused(x, w, gain)[0]
    y.sum().backward()
    assert x.grad is None and w.grad is not None and gain.grad is not None


def test_saved_values_are_not_differentiable_and_unharmed_by_edits(device):
    """Where nothing follows the norm y and u are equal, yet may not be one tensor."""
    x, w, _ = make(device, torch.float32)
    y, _, _, u, r, _ = fused(x, w, None)
    assert y.requires_grad and not u.requires_grad and not r.requires_grad
    g = torch.randn_like(y)
    (want,) = torch.autograd.grad(y, w, g, retain_graph=True)
    edited = fused(x, w, None)[0]
    edited.mul_(3)
    (got,) = torch.autograd.grad(edited, w, g / 3)
    torch.testing.assert_close(got, want)


def test_outputs_may_be_edited_in_place(device):
    """`nn.ReLU(inplace=True)` behind a linear or a norm, in eager mode."""
    x, w, gain = make(device, torch.float32)
    for y in (
        linear(x, w, gain, ROW, ROW, ROW, []),
        fused(x, w, gain)[0],
        L.block_norm(x, None, 4, EPS)[0],
    ):
        y.relu_().sum().backward()
        assert torch.isfinite(x.grad).all()


def test_probe_records_the_gradient_after_the_epilogue(device):
    x, w, gain = make(device, torch.float32)
    state = Statistics.empty(N, torch.float32, device)
    places = Places([state], torch.device(device))
    y = fused(x, w, gain, 4, "hard_swish", probe=probe_of(places))[0]
    assert state.batches == 0
    g = torch.randn_like(y)
    y.backward(g)
    _, _, _, u, r, _ = fused(x, w, gain, 4, "hard_swish")
    gz, _ = L.block_norm_act_backward(g, u, r, gain, 4, "hard_swish", False)
    assert state.batches == 1
    torch.testing.assert_close(state.reservoir(), gz)


def test_two_forwards_before_a_backward_share_one_probe(device):
    """A siamese loss, and retain_graph: the state that one backward wrote is saved by the other."""
    x, w, _ = make(device, torch.float32)
    state = Statistics.empty(N, torch.float32, device)
    places = Places([state], torch.device(device))
    a, b = (linear(t, w, None, HIGH, HIGH, HIGH, probe_of(places)) for t in (x, 2 * x))
    loss = (a * b).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert state.batches == 4


def test_ops_are_lowered_from_the_import_on(tmp_path):
    """BlockNorm modules run under plain Inductor, in processes that never load the backend."""
    code = (
        "import sys, torch; torch.compile(lambda x: x + 1, backend='aot_eager')(torch.ones(2));"
        "import loka_compile; loka_compile.BlockNorm;"
        "assert 'loka_compile.backend' not in sys.modules;"
        "from loka_compile import _compat; from loka_compile.lowering import ops;"
        "assert _compat.missing_decompositions(ops.DECOMPOSITIONS) == []"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
