"""Weights quantised once per training step, through the whole backend."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import loka_compile
from loka_compile import _compat
from loka_compile import variant
from loka_compile.lowering.recipes import HIGH_PRECISION as HIGH
from loka_compile.passes.share_weights import ShareWeights

T = "torch:tensorwise"
OWN = {"fwd": "loka:tensorwise", "dgrad": T, "wgrad": T}


@pytest.fixture(autouse=True)
def _fp8_anywhere(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(_compat, "why_no_fp8", lambda device: None)


class Model(nn.Module):
    """A first layer without dgrad; widths that are no multiples of 16; a weight stored [K, N]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 64)
        self.norm = nn.LayerNorm(64)
        self.chain = nn.Linear(64, 64)
        self.odd = nn.Linear(64, 40)
        self.turned = nn.Parameter(torch.randn(40, 32) / 6)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = nn.functional.silu(self.norm(self.chain(x)))
        return torch.relu(self.odd(x)) @ self.turned


FORCE = {"*": T, "chain": OWN}


def step(model, x, devices, monkeypatch, autocast=False, **options):
    torch._dynamo.reset()
    monkeypatch.setattr(variant, "ShareWeights", functools.partial(ShareWeights, devices))
    chosen = {"mods": "on", "inner": "aot_eager", "force": FORCE, "libraries": ("loka", "torch")}
    compiled = torch.compile(model, backend="loka", options={**chosen, **options})
    with (
        loka_compile.explain() as report,
        torch.autocast(x.device.type, torch.bfloat16, enabled=autocast),
    ):
        y = compiled(x)
        y.float().square().sum().backward()
    return y, {n: p.grad for n, p in model.named_parameters()}, report.diff("share_weights")


@pytest.mark.parametrize("autocast", [False, True])
def test_same_step_with_fewer_quantisations(device, monkeypatch, autocast) -> None:
    torch.manual_seed(0)
    model = Model().to(device)
    other = copy.deepcopy(model)
    x = torch.randn(40, 48, device=device)
    y, grads, diff = step(model, x, ("cpu", "cuda"), monkeypatch, autocast)
    want, want_grads, _ = step(other, x, (), monkeypatch, autocast)
    # All but the first layer, whose input needs no gradient.
    assert diff.count("loka.quantize_weight") == 3
    assert torch.equal(y, want)
    for name, gradient in want_grads.items():
        if gradient is None:
            assert grads[name] is None
        else:
            assert torch.equal(grads[name], gradient), name


def test_left_alone(device, monkeypatch) -> None:
    """No sharing without an FP8 dgrad, and none in inference."""
    model = Model().to(device)
    x = torch.randn(40, 48, device=device)
    kept = {"*": {"fwd": T, "dgrad": HIGH, "wgrad": T}}
    _, _, diff = step(model, x, ("cpu", "cuda"), monkeypatch, force=kept)
    assert "quantize_weight" not in diff
    torch._dynamo.reset()
    with torch.no_grad(), loka_compile.explain() as report:
        options = {"mods": "on", "inner": "aot_eager", "force": FORCE}
        torch.compile(model, backend="loka", options=options)(x)
    assert "quantize_weight" not in report.diff("share_weights")
