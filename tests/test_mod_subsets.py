"""A switch for each Mod: every subset computes the same as modules and in the graph."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import nn

import loka_compile
from loka_compile import loka_backend
from loka_compile.mod_set import EVERY

SUBSETS = [s for n in range(len(EVERY) + 1) for s in itertools.combinations(EVERY, n)]
KEEPS = {
    "of one Mod": {"no_bias": ["0"]},
    "of each": {"no_bias": ["1", "3"], "block_norm": ["1", "6"], "hard_swish": ["4.*"]},
}


class SwishNorm(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(n), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.norm(x)


def trained() -> nn.Module:
    """No parameter at its initial value, so that whatever goes is missed."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 300),
        nn.LayerNorm(300, eps=1e-3),
        nn.SiLU(),
        nn.Linear(300, 32),
        SwishNorm(32),
        nn.Linear(32, 320),
        nn.RMSNorm(320, eps=1e-5),
        nn.Linear(320, 2),
    )
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def compile_(model: nn.Module, **options: object) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(model, backend=loka_backend, options={"inner": "aot_eager", **options})


def outcome(model: nn.Module, call) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(7, 16, requires_grad=True)
    y = call(x)
    y.backward(torch.randn_like(y))
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **grads}


@functools.cache
def everything() -> dict[str, torch.Tensor]:
    baked = trained()
    loka_compile.apply_mods(baked)
    return outcome(baked, baked)


def agree(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        error = (got[name].double() - value.double()).norm()
        assert error <= 2e-5 * value.double().norm(), (name, error)


@pytest.mark.parametrize("mods", SUBSETS, ids="+".join)
def test_each_subset_as_modules_and_in_the_graph(mods) -> None:
    """Values and gradients; a bias that is gone has none."""
    model, baked = trained(), trained()
    report = loka_compile.apply_mods(baked, mods=mods)
    with loka_compile.explain() as seen:
        got = outcome(model, compile_(model, mods=mods))
    agree(got, outcome(baked, baked))
    # Another function than that of every other subset.
    assert mods == EVERY or not torch.allclose(got["y"], everything()["y"], rtol=1e-2)
    assert report.left_off == tuple(mod for mod in EVERY if mod not in mods)
    # The graph counts the same changes, by other words.
    changed = sum(
        n.what == "bias removed" for g in seen.graphs for r in g.records for n in r.changes
    )
    assert (
        changed
        == sum(what == "bias removed" for _, what in report.changes)
        == 5 * ("no_bias" in mods)
    )
    names = [r.name for g in seen.graphs for r in g.records]
    assert ("strip_bias" in names, "block_norm" in names, "hard_swish" in names) == tuple(
        mod in mods for mod in EVERY
    )


@pytest.mark.parametrize("case", KEEPS)
def test_layers_are_kept_as_modules_and_in_the_graph(case) -> None:
    model, baked = trained(), trained()
    report = loka_compile.apply_mods(baked, keep=KEEPS[case])
    with loka_compile.explain() as seen:
        got = outcome(model, compile_(model, mods="on", keep=KEEPS[case]))
    agree(got, outcome(baked, baked))
    assert report.kept and f"kept as written for {report.kept[0][0]}" in report.summary()
    kept = {
        (mod, layer) for mod, layers in loka_compile.plan_of(model).kept.items() for layer in layers
    }
    assert kept == set(report.kept)
    assert "(option keep)" in seen.text() and "keep, or the plan, says so" in seen.text()


def test_in_fp8_a_subset_is_the_same_subset() -> None:
    """Kept biases are in the function that FP8 runs, and in its gradients."""
    model, baked = trained(), trained()
    some = {"mods": ("no_bias", "block_norm"), "keep": {"no_bias": ["0", "5"]}}
    loka_compile.apply_mods(baked, **some)
    compiled = compile_(model, emulate=True, force={"*": "torch:rowwise"}, **some)
    got, want = outcome(model, compiled), outcome(baked, baked)
    plan = loka_compile.plan_of(model)
    assert plan.sites["0"].choice("fwd").is_fp8 and plan.kept == {"no_bias": ("0", "5")}
    assert {"0.bias", "5.bias"} <= got.keys() and "3.bias" not in got
    assert got.keys() == want.keys()
    for name, value in want.items():
        error = (got[name] - value).norm() / value.norm()
        assert error < 0.2, (name, error)
    assert not torch.allclose(got["y"], want["y"], rtol=1e-6)
