"""Exact pointwise epilogues through the whole backend: which forms fuse, which are refused, values.

The opaque op runs its plain-torch form here; on a GPU the same tests run the kernel.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import loka_compile
from loka_compile.lowering.recipes import HIGH_PRECISION as HIGH

T = "torch:tensorwise"
OWN = {"fwd": "loka:tensorwise", "dgrad": T, "wgrad": T}


pytestmark = pytest.mark.usefixtures("fp8_anywhere")


class Two(nn.Module):
    """One linear and what follows it, then a head that stays high."""

    def __init__(self, after, bias=True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(48, 48, bias=bias)
        self.other = nn.Linear(48, 48)
        self.mix = nn.Parameter(torch.tensor([0.3, 0.7]))
        self.head = nn.Linear(48, 1)
        self.after = after

    def forward(self, x):
        return self.head(self.after(self, x)).squeeze(-1)


FUSED = {
    "linear + bias + relu": lambda s, x: torch.relu(s.linear(x)),
    "linear + bias + silu": lambda s, x: F.silu(s.linear(x)),
    "linear + bias + gelu": lambda s, x: F.gelu(s.linear(x)),
    "linear + bias + addend": lambda s, x: s.linear(x) + x,
    "linear + bias + addend + relu": lambda s, x: torch.relu(x + s.linear(x)),
    # DCN-V2, and an ensemble's weighted sum.
    "linear + bias + factor + addend": lambda s, x: x * s.linear(torch.tanh(x)) + x,
    "linear + bias + factor + addend ": lambda s, x: x + torch.softmax(s.mix, 0)[1] * s.linear(x),
    # Two linears into one sum: the first takes the second in.
    "linear + bias + addend ": lambda s, x: s.linear(x) + s.other(x),
}
LEFT = {
    "another reader": lambda s, x: F.relu(h := s.linear(x)) + h,
    "tanh gelu": lambda s, x: F.gelu(s.linear(x), approximate="tanh"),
    "broadcast": lambda s, x: s.linear(x) + s.other.bias,
    "scaled": lambda s, x: torch.add(s.linear(x), x, alpha=2.0),
    "factor alone": lambda s, x: s.linear(x) * x,
    "itself": lambda s, x: (h := s.linear(x)) + h,
    "in place": lambda s, x: s.linear(x).add_(x),
}


def run(model, x, force, autocast=False, **options):
    torch._dynamo.reset()
    chosen = {"mods": "off", "inner": "aot_eager", "libraries": ("loka", "torch"), **options}
    chosen["force"] = {"*": HIGH, **force}
    compiled = torch.compile(model, backend="loka", options=chosen)
    with (
        loka_compile.explain() as report,
        torch.autocast(x.device.type, torch.bfloat16, enabled=autocast),
    ):
        y = compiled(x)
        y.float().square().sum().backward()
    return y, {n: p.grad for n, p in model.named_parameters()}, report


def near(got, want, allowed: float) -> bool:
    return bool((got.double() - want.double()).norm() <= allowed * want.double().norm())


@pytest.mark.parametrize(
    ("form", "autocast"),
    [*((form, False) for form in FUSED), *((form, True) for form in list(FUSED)[1:6:2])],
)
def test_fuses_exactly(form: str, autocast: bool, device) -> None:
    model = Two(FUSED[form]).to(device)
    other = copy.deepcopy(model)
    x = torch.randn(40, 48, device=device)
    y, grads, report = run(model, x, {"linear": OWN}, autocast)
    assert f"fused {form.strip()}" in str(report.rewrites)
    assert report.diff("fuse_pointwise").count("loka.linear_pointwise") == 1
    # The same FP8 operands in steps: only roundings differ.
    want, want_grads, _ = run(other, x, {"linear": T}, autocast)
    assert y.dtype == want.dtype and near(y, want, 2e-2 if autocast else 1e-5)
    for name, gradient in want_grads.items():
        if gradient is None:
            assert grads[name] is None
        else:
            assert near(grads[name], gradient, 5e-2 if autocast else 2e-2), name


@pytest.mark.parametrize("form", list(LEFT))
def test_left_as_written(form: str, device) -> None:
    model = Two(LEFT[form]).to(device)
    other = copy.deepcopy(model)
    x = torch.randn(40, 48, device=device)
    y, _, report = run(model, x, {"linear": OWN})
    assert "loka.linear_pointwise" not in report.diff("fuse_pointwise")
    assert "not part of a fused chain" in str(report.refusals)
    want, _, _ = run(other, x, {})
    assert near(y, want, 1e-5)


def test_written_in_between(device) -> None:
    """What the epilogue reads later must be what it was at the linear."""

    def after(s, x):
        kept = x.clone()
        h = s.linear(kept)
        kept.mul_(2)
        return h + kept

    model = Two(after).to(device)
    x = torch.randn(40, 48, device=device)
    options = {"mods": "off", "inner": "aot_eager", "libraries": ("loka", "torch")}
    options["force"] = {"*": HIGH, "linear": OWN}
    torch._dynamo.reset()
    with torch.no_grad(), loka_compile.explain() as report:
        y = torch.compile(model, backend="loka", options=options)(x)
        assert near(y, model(x), 0.1)
    assert "exact epilogue not fused" in str(report.refusals)
    assert "written to in place" in str(report.refusals)


def test_graphs_without_our_kernel_stay_as_they_were(device) -> None:
    model = Two(FUSED["linear + bias + relu"]).to(device)
    _, _, report = run(model, torch.randn(40, 48, device=device), {"linear": T})
    assert report.diff("fuse_pointwise") == ""


def test_dynamic_batches_and_inference(device) -> None:
    model = Two(FUSED["linear + bias + factor + addend"]).to(device)
    torch._dynamo.reset()
    options = {"mods": "off", "inner": "aot_eager", "libraries": ("loka", "torch")}
    options["force"] = {"*": HIGH, "linear": OWN}
    compiled = torch.compile(model, backend="loka", options=options, dynamic=True)
    for m in (40, 17, 3):
        x = torch.randn(m, 48, device=device)
        with torch.no_grad():
            assert near(compiled(x), model(x), 0.1)
        compiled(x).sum().backward()
