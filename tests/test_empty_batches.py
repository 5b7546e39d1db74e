"""Batches without rows: every plain-torch form of a kernel, and compiled models, both ways.

A size that is known to be 0 is compiled for; one that depends on the data may turn out to be 0.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch import nn
from torch.nn import functional as F

from loka_compile import loka_backend
from loka_compile import plan_of
from loka_compile.kernels import quantize as q
from loka_compile.kernels.orientations import KINDS
from loka_compile.kernels.orientations import Scale
from loka_compile.kernels.orientations import quantize_both_ref
from loka_compile.lowering import chain
from loka_compile.lowering import chain_backward
from loka_compile.probe import coherence
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.statistics import observe_ref

E4M3 = torch.float8_e4m3fn
N, K = 64, 32


@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0), (2, 0, 4)])
def test_maxima_of_nothing_are_zero(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert q.amax_tensorwise(x).shape == () and q.amax_tensorwise(x) == 0
    rows = q.amax_rowwise(x)
    assert rows.shape == (*shape[:-1], 1) and not rows.any() and rows.dtype == torch.float32
    for quantise in (q.quantize_tensorwise, q.quantize_rowwise):
        q8, scale = quantise(x, E4M3)
        assert q8.shape == shape and torch.isfinite(scale).all() and (scale > 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 32), (32, 0)])
def test_operands_in_both_orientations(kind: str, shape: tuple[int, int]) -> None:
    rule = Scale(kind)
    both = quantize_both_ref(torch.randn(shape), rule, rule, static=torch.ones(()))
    rows, columns = shape
    assert both.q.shape == shape and both.qt.shape == (columns, -(-rows // 16) * 16)
    assert both.scale.shape == rule.shape(rows, columns)
    assert both.scale_t.shape == rule.shape(columns, rows)


@pytest.mark.parametrize("gain", [None, torch.ones(N)])
@pytest.mark.parametrize(
    "act, gate", [("none", False), ("hard_swish", False), ("hard_sigmoid", True)]
)
def test_the_chains_backward(gain: Tensor | None, act: str, gate: bool) -> None:
    gy, u, r = torch.randn(0, N), torch.randn(0, N), torch.randn(0, 1)
    for rows, rows_t in itertools.product((True, False), repeat=2):
        made = chain_backward.fused_chain_backward_ref(
            gy, u, r, gain, N, act, gate, rows, E4M3, rows_t, E4M3
        )
        shapes = [tuple(t.shape) for t in made[:4]]
        assert shapes == [(0, N), (0, 1) if rows else (), (N, 0), (N, 1) if rows_t else ()]
        assert torch.isfinite(made[3]).all() and not made[4].any()
    made = chain_backward.fused_chain_backward_groups_ref(gy, u, r, gain, N, act, gate, E4M3, E4M3)
    assert made[0].shape == (0, N) and made[2].shape == (N, 0)


def test_the_chains_forward() -> None:
    a, w, one = torch.randn(0, K).to(E4M3), torch.randn(N, K).to(E4M3), torch.ones(())
    y, yt, u, r = chain.fused_chain_ref(
        a, one, w, one, None, None, N, 1e-6, True, "hard_swish", False, True, torch.bfloat16, one,
        True, True,
    )  # fmt: skip
    assert y.shape == u.shape == (0, N) and yt.shape == (N, 0) and r.shape == (0, 1)


def test_what_observers_record_stays_as_it_is() -> None:
    held = Statistics.empty(N, torch.float32, torch.device("cpu"), gradient=True)
    before = [t.clone() for t in held.tensors]
    observe_ref(torch.randn(0, N), None, *held.tensors[:3])
    coherence.record_ref(
        torch.zeros(N, K), torch.randn(0, N), torch.randn(0, K), held.scalars, held.coherence,
        held.sketch, held.marks,
    )  # fmt: skip
    for one, other in zip(held.tensors, before, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


class Net(nn.Module):
    """A chain, an epilogue and a plain linear; `masked`: of the rows that begin above zero."""

    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        self.masked = masked
        self.a, self.norm = nn.Linear(K, N), nn.LayerNorm(N)
        self.b, self.c = nn.Linear(N, N), nn.Linear(N, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.masked:
            x = x[x[:, 0] > 0]
        return self.c(F.relu(self.b(F.silu(self.norm(self.a(x))))))


def run_of(model: nn.Module, kernel: str | None, **how) -> nn.Module:
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "emulate": True, "mods": "on", "heads": ()}
    if kernel is not None:
        options["force"] = {"*": kernel}
    return torch.compile(model, backend=loka_backend, options=options, **how)


@pytest.mark.parametrize("kernel", ["loka:tensorwise", "loka:rowwise", None])
def test_a_model_without_rows(kernel: str | None) -> None:
    """None: while it is probed, where such a batch must neither fail nor be taken for one."""
    model = Net()
    run = run_of(model, kernel)
    for rows in (0, 24, 0):
        model.zero_grad()
        x = torch.randn(rows, K, requires_grad=True)
        y = run(x)
        y.sum().backward()
        assert y.shape == x.grad.shape == (rows, K)
        gradients = [p.grad for name, p in model.named_parameters() if not name.endswith("bias")]
        assert all(torch.isfinite(g).all() for g in gradients)
        assert bool(model.a.weight.grad.any()) == (rows > 0)


def test_no_rows_under_a_plan_with_a_chain(caplog) -> None:
    """A graph of its own size, which the plan's kernels must compile for, too."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.SiLU(), nn.Linear(128, 64))
    options = {
        "inner": "aot_eager", "emulate": True, "mods": "on", "min_speedup": 0.0, "tune": "never",
        "libraries": ("loka", "torch"), "heads": (),
    }  # fmt: skip
    run = torch.compile(model, backend=loka_backend, options=options, dynamic=False)
    for _ in range(9):
        run(torch.randn(48, 64)).sum().backward()
    assert any(s.choice("fwd").is_fp8 for s in plan_of(model).sites.values())
    run(torch.randn(0, 64)).sum().backward()
    assert "refused" not in caplog.text and "do not run here" not in caplog.text


@pytest.mark.parametrize("kernel", ["torch:tensorwise", "torch:rowwise"])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_rows_that_a_mask_leaves(kernel: str) -> None:
    """Their number is known when it runs: as many as there are, or none."""
    model = Net(masked=True)
    run = run_of(model, kernel, fullgraph=True)
    for rows in (24, 0, 7, 1):
        model.zero_grad()
        x = torch.randn(32, K)
        x[:, 0] = -1
        x[:rows, 0] = 1
        y = run(x.requires_grad_())
        y.sum().backward()
        assert y.shape == (rows, K) and x.grad.shape == x.shape
        assert bool(model.a.weight.grad.any()) == (rows > 0)
        assert not x.grad[rows:].any()
