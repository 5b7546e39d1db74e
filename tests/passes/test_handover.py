"""FP8 hand-over and stored weights, through the whole backend, with "real" kernels on the CPU.

The opaque ops run their plain-torch form here; on a GPU the same tests run the kernels.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import loka_compile
from loka_compile import _compat
from loka_compile.lowering.recipes import HIGH_PRECISION as HIGH

T = "torch:tensorwise"
CHAIN = {"fwd": "loka:tensorwise", "dgrad": T, "wgrad": T}


@pytest.fixture(autouse=True)
def _fp8_anywhere(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(_compat, "why_no_fp8", lambda device: None)


class Model(nn.Module):
    """A chain of two, an FP8 linear behind it, a ReLU that needs high precision, a head."""

    def __init__(self) -> None:
        super().__init__()
        chain: list[nn.Module] = []
        for k in (48, 64):
            chain += [nn.Linear(k, 64), nn.LayerNorm(64), nn.SiLU()]
        self.chain = nn.Sequential(*chain)
        self.wide = nn.Linear(64, 32)
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(torch.relu(self.wide(self.chain(x)))).squeeze(-1)


def compiled(model, force, **options):
    torch._dynamo.reset()
    chosen = {"mods": "on", "inner": "aot_eager", "force": force, "libraries": ("loka", "torch")}
    return torch.compile(model, backend="loka", options={**chosen, **options})


FORCE = {"chain.*": CHAIN, "wide": T, "head": HIGH}


def test_a_chain_never_leaves_fp8_between_its_gemms(device):
    torch.manual_seed(0)
    model = Model().to(device)
    exact = copy.deepcopy(model)
    x = torch.randn(40, 48, device=device)
    with loka_compile.explain() as report:
        y = compiled(model, FORCE)(x)
        y.sum().backward()
    text = report.diff("handover")
    # Both chains hand over, with the transpose that the readers' wgrad takes.
    assert text.count("'y8t'") == 2
    want = compiled(exact, {"*": HIGH})(x)
    want.sum().backward()
    assert (y - want).norm() / want.norm() < 0.12
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        if theirs.grad is not None and theirs.grad.norm() > 0:
            assert mine.grad is not None
            assert (
                torch.nn.functional.cosine_similarity(
                    mine.grad.flatten(), theirs.grad.flatten(), dim=0
                )
                > 0.95
            )


def test_refused_where_somebody_needs_high_precision(device):
    model = Model().to(device)
    x = torch.randn(40, 48, device=device)
    with loka_compile.explain() as report:
        compiled(model, {**FORCE, "wide": HIGH})(x).sum().backward()
    reasons = " ".join(str(r) for r in report.refusals)
    assert "no e4m3 hand-over: the forward of wide stays in high precision" in reasons
    assert report.diff("handover").count("'y8t'") == 1


def test_inference_quantises_weights_once_per_version(device, monkeypatch):
    from loka_compile.lowering import weight_cache

    counted = []
    real = weight_cache._quantized
    monkeypatch.setattr(weight_cache, "_quantized", lambda *a: (counted.append(1), real(*a))[1])
    model = Model().to(device).requires_grad_(False)
    x = torch.randn(40, 48, device=device)
    with torch.no_grad():
        infer = compiled(model, FORCE)
        first = infer(x)
        made = len(counted)
        assert torch.equal(infer(x), first) and len(counted) == made
        # In place, by a state dict, and by an optimizer that moves no version counter.
        model.wide.weight.mul_(2)
        assert not torch.equal(infer(x), first)
        assert len(counted) == made + 1
        model.wide.weight.div_(2)
        torch.testing.assert_close(infer(x), first)
        weight_cache._count_step()
        before = len(counted)
        infer(x)
        assert len(counted) == before + 3


def test_a_model_made_under_inference_mode_runs(device):
    """Its parameters have no version counters."""
    with torch.inference_mode():
        model = Model().to(device)
        x = torch.randn(40, 48, device=device)
        infer = compiled(model, FORCE)
        torch.testing.assert_close(infer(x), infer(x))
        assert infer(x).isfinite().all()
        assert loka_compile.plan_of(model).sites["wide"].kernels[0] == T


def test_without_the_cache_nothing_is_stored(device):
    model = Model().to(device)
    x = torch.randn(40, 48, device=device)
    with torch.no_grad(), loka_compile.explain() as report:
        off = compiled(model, FORCE, weight_cache="off")(x)
        on = compiled(model, FORCE)(x)
    torch.testing.assert_close(off, on)
    assert report.graphs


def test_a_kernel_for_chains_is_refused_at_a_plain_linear(device):
    class Plain(Model):
        def forward(self, x):
            # No exact epilogue either: our kernel knows no tanh.
            return self.head(torch.tanh(self.wide(self.chain(x)))).squeeze(-1)

    model = Plain().to(device)
    x = torch.randn(40, 48, device=device)
    with loka_compile.explain() as report:
        compiled(model, {"wide": CHAIN})(x)
    assert "not part of a fused chain" in " ".join(str(r) for r in report.refusals)
