"""Public bug reports restated: pattern matching and observers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import loka_compile
from loka_compile import loka_backend
from loka_compile.ledger import LEDGER

FP8 = {"inner": "aot_eager", "mods": "off", "emulate": True}


def of(function, *modules: nn.Module) -> nn.Module:
    """A module that computes function(*modules, x)."""

    class Case(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(modules)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(*self.parts, x)

    return Case()


@pytest.mark.parametrize("eps", [1e-5, None, 1e-2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eps_is_read_from_the_norm(agrees, eps: float | None, dtype: torch.dtype) -> None:
    """apache/tvm#15856: RMSNorm fused with a hard-coded eps, small inputs."""
    parts = nn.Linear(32, 64, bias=False), nn.RMSNorm(64, eps=eps), nn.Linear(64, 32)
    model = of(lambda a, n, b, x: b(n(a(x))), *parts).to(dtype)
    agrees(model, 1e-3 * torch.randn(32, 32, dtype=dtype), fp8=dtype != torch.float32)


def _matched_across_a_write(lin, norm, x):
    x = x.clone()
    h = lin(x)
    x.mul_(2)
    return norm(h) + x


CASES = {
    "pytorch#68178: called twice, fused the second time": (
        lambda lin, norm, x: norm(lin(lin(x))),
        (nn.Linear(64, 64, bias=False), nn.RMSNorm(64)),
    ),
    "pytorch#130584: an in-place write in between": (
        _matched_across_a_write,
        (nn.Linear(64, 64, bias=False).requires_grad_(False), nn.RMSNorm(64)),
    ),
    "pytorch#162029: an operand computed after the first node": (
        lambda lin, other, norm, x: F.rms_norm(lin(x), (64,), other(x).mean(0).abs() + 1) + norm(x),
        (nn.Linear(64, 64, bias=False), nn.Linear(64, 64), nn.RMSNorm(64)),
    ),
    "pytorch#100679: products and sums that broadcast": (
        lambda a, b, x: a(x[:1]) + b(x) + a(x).unsqueeze(0),
        (nn.Linear(64, 64), nn.Linear(64, 64)),
    ),
    "pytorch#195383: operands permuted along the batch": (
        lambda q, k, x: (q(x) @ k(x.flip(0)).t()).softmax(-1) @ x,
        (nn.Linear(64, 64), nn.Linear(64, 64)),
    ),
    "pytorch#186577: a reciprocal behind the norm": (
        lambda lin, norm, x: 1 / (norm(lin(x)).abs() + 1e-2),
        (nn.Linear(64, 64, bias=False), nn.RMSNorm(64)),
    ),
    "torch-spyre#1980: LayerNorm without affine": (
        lambda lin, norm, x: norm(lin(x)),
        (nn.Linear(64, 64), nn.LayerNorm(64, elementwise_affine=False)),
    ),
    "torch-spyre#1980: LayerNorm over two dimensions": (
        lambda lin, norm, x: norm(lin(x).view(-1, 4, 16)),
        (nn.Linear(64, 64), nn.LayerNorm((4, 16), bias=False)),
    ),
    "pytorch#118990: BatchNorm over another dimension": (
        lambda lin, norm, x: norm(lin(x.view(4, 4, -1, 64))),
        (nn.Linear(64, 32), nn.BatchNorm2d(4)),
    ),
    "pytorch#118990: GroupNorm over another dimension": (
        lambda lin, norm, x: norm(lin(x.view(4, 4, -1, 64))),
        (nn.Linear(64, 32), nn.GroupNorm(2, 4)),
    ),
    "vllm#24604: casts around a residual": (
        lambda lin, norm, last, x: last(
            norm(lin(x.bfloat16()).float() + x.float()).to(torch.bfloat16)
        ),
        (
            nn.Linear(64, 64, bias=False).bfloat16(),
            nn.RMSNorm(64),
            nn.Linear(64, 32).bfloat16(),
        ),
    ),
    "vllm#41767: the last argument None, given or not": (
        lambda lin, x: F.rms_norm(lin(x), (64,), None, None) + F.rms_norm(lin(x), (64,)),
        (nn.Linear(64, 64, bias=False),),
    ),
}


@pytest.mark.parametrize("what", CASES)
def test_the_function_is_kept(agrees, what: str) -> None:
    """Mods off: whatever is matched or refused, the result is that of eager."""
    function, modules = CASES[what]
    agrees(of(function, *modules), torch.randn(32, 64))


@pytest.mark.parametrize("what", [w for w in CASES if "#118990" in w or "two dim" in w])
def test_norms_over_other_dimensions_stay_under_mods(agrees, what: str) -> None:
    """pytorch/pytorch#118990, torch-spyre/torch-spyre#1980: only the bias of the linear may go."""
    function, modules = CASES[what]
    model = of(function, nn.Linear(64, modules[0].out_features, bias=False), *modules[1:])
    agrees(model, torch.randn(32, 64), options={"mods": "on"})


@pytest.mark.parametrize("spelling", [(None, None), ()])
def test_matching_does_not_stop_silently(spelling: tuple) -> None:
    """vllm-project/vllm#41767: one more None in the call and the pattern matched no more."""
    torch._dynamo.reset()
    model = of(lambda lin, x: F.rms_norm(lin(x), (64,), *spelling), nn.Linear(32, 64, bias=False))
    options = {**FP8, "mods": "on"}
    with loka_compile.explain() as report:
        torch.compile(model, backend=loka_backend, options=options)(torch.randn(8, 32))
    assert report.sites[0]["fused"] is not None


# -- observers ------------------------------------------------------------------------------------


def test_probe_state_is_bounded_and_outside_the_state_dict() -> None:
    """pytorch/ao#3946 (memory grew per batch), fvcore#52 (observer buffers in checkpoints)."""
    torch._dynamo.reset()
    model = of(lambda a, x: a(x), nn.Linear(32, 64))
    keys = list(model.state_dict())
    compiled = torch.compile(model, backend=loka_backend, options=FP8)
    sizes = []
    for _ in range(8):
        compiled(torch.randn(64, 32)).sum().backward()
        entry = LEDGER.find(model.parts[0].weight)
        sizes.append(sum(t.numel() for s in entry.statistics.values() for t in s.tensors))
    assert len(set(sizes)) == 1 and list(model.state_dict()) == keys


def test_a_frozen_module_in_eval_inside_a_training_model(agrees) -> None:
    """NVIDIA/TransformerEngine#728: backward failed through modules in eval."""
    frozen = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5)).eval().requires_grad_(False)
    model = of(lambda f, a, x: a(f(x)), frozen, nn.Linear(64, 32))
    agrees(model, torch.randn(32, 32, requires_grad=True), fp8=True)


def test_empty_batches_between_probes() -> None:
    """pytorch/pytorch#49800: an observer crashed on an empty tensor."""
    torch._dynamo.reset()
    model = of(lambda a, x: a(x), nn.Linear(32, 64))
    compiled = torch.compile(model, backend=loka_backend, options=FP8, dynamic=True)
    for rows in (16, 16, 0, 16):
        compiled(torch.randn(rows, 32)).sum().backward()
    seen = LEDGER.find(model.parts[0].weight).statistics[(0, "x")]
    assert seen.batches == 3 and torch.isfinite(seen.moments).all()


def test_statistics_reset_from_outside_take_effect() -> None:
    """pytorch/pytorch#115774: a buffer replaced between steps was stale in compiled code."""
    torch._dynamo.reset()
    model = of(lambda a, x: a(x), nn.Linear(32, 64))
    compiled = torch.compile(model, backend=loka_backend, options=FP8)
    compiled(torch.randn(16, 32)).sum().backward()
    seen = LEDGER.find(model.parts[0].weight).statistics[(0, "x")]
    for tensor in seen.tensors:
        tensor.zero_()
    compiled(torch.full((16, 32), 3.0)).sum().backward()
    assert seen.batches == 1 and torch.equal(seen.mean(), torch.full((32,), 3.0).double())
