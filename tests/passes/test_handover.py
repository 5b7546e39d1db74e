"""FP8 hand-over and stored weights, through the whole backend, with "real" kernels on the CPU.

The opaque ops run their plain-torch form here; on a GPU the same tests run the kernels.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import loka_compile
from loka_compile.lowering.recipes import HIGH_PRECISION as HIGH

T = "torch:tensorwise"
CHAIN = {"fwd": "loka:tensorwise", "dgrad": T, "wgrad": T}


pytestmark = pytest.mark.usefixtures("fp8_anywhere")


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


class Normed(nn.Module):
    """A norm that follows no linear, in front of a chain, and one whose view a linear reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.chain = nn.Sequential(nn.Linear(48, 64), nn.LayerNorm(64), nn.SiLU())
        self.outer = nn.LayerNorm(16)
        self.wide = nn.Linear(64, 32)

    def forward(self, x):
        z = self.chain(self.norm(x)).view(-1, 4, 16)
        return self.wide(self.outer(torch.relu(z)).flatten(1)).square().sum(1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_norm_hands_over_with_a_static_scale(device, dynamic: bool):
    torch.manual_seed(0)
    model = Normed().to(device)
    with torch.no_grad():
        model.norm.weight.mul_(3)
    exact = copy.deepcopy(model)
    x = torch.randn(37, 48, device=device)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    force = {"chain.*": CHAIN, "wide": T}
    with loka_compile.explain() as report:
        y = compiled(model, force)(x)
        y.sum().backward()
    assert report.diff("handover").count("loka.bounded_e4m3") == 2
    want = compiled(exact, {"*": HIGH})(x)
    want.sum().backward()
    assert (y - want).norm() / want.norm() < 0.12
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        if theirs.grad is not None and theirs.grad.norm() > 0:
            assert mine.grad is not None
            cosine = torch.nn.functional.cosine_similarity
            assert cosine(mine.grad.flatten(), theirs.grad.flatten(), dim=0) > 0.95


def test_a_norm_keeps_its_result_for_a_wgrad_in_high_precision(device):
    model = Normed().to(device)
    x = torch.randn(37, 48, device=device)
    kept = {"fwd": T, "dgrad": T, "wgrad": HIGH}
    with loka_compile.explain() as report:
        compiled(model, {"chain.*": kept, "wide": kept})(x).sum().backward()
    assert "bounded_e4m3" not in report.diff("handover")
    with loka_compile.explain() as report, torch.no_grad():
        compiled(model, {"chain.*": kept, "wide": kept})(x)
    assert report.diff("handover").count("loka.bounded_e4m3") == 2


def test_bounded_values_and_their_transpose():
    from loka_compile.lowering.bounded import bounded_e4m3

    torch.manual_seed(0)
    gain = torch.randn(48)
    u = torch.randn(5, 3, 48)
    u = u / u.square().mean(-1, keepdim=True).sqrt()
    y = u * gain
    y8, scale, y8t = bounded_e4m3(y, gain, 48, True)
    torch.testing.assert_close(scale, 48**0.5 * gain.abs().amax() / 448)
    assert (y8.float().abs() <= 448).all()
    assert (y8.float() * scale - y).norm() / y.norm() < 0.05
    assert y8t.shape == (48, 16)
    rows = y8.reshape(15, 48).float()
    assert torch.equal(y8t.float()[:, :15], rows.t()) and (y8t.float()[:, 15:] == 0).all()
