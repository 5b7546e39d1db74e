"""The backend end to end: real training loops through torch.compile, quick inner compiler."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from backend_net import FP8
from backend_net import QUICK
from backend_net import Net
from backend_net import compile_
from backend_net import gradients
from backend_net import modded
from backend_net import train
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import loka_compile
from loka_compile.ledger import LEDGER


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(48, 32)


def test_mods_off_and_no_fp8_is_the_model_as_written(x: torch.Tensor) -> None:
    model = Net()
    compiled = compile_(model, {**QUICK, "mods": "off"})
    y = compiled(x)
    y.square().sum().backward()
    got = gradients(model)
    model.zero_grad()
    reference = model(x)
    reference.square().sum().backward()
    torch.testing.assert_close(y, reference, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_mods_on_computes_the_modded_function(x: torch.Tensor) -> None:
    model = Net()
    compiled = compile_(model, {**QUICK, "mods": "on"})
    y = compiled(x)
    y.square().sum().backward()
    got = gradients(model)
    assert got["net.0.bias"] is None and got["net.1.bias"] is None
    assert got["head.bias"] is not None
    model.zero_grad()
    reference = modded(model, x)
    reference.square().sum().backward()
    torch.testing.assert_close(y, reference, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients(model).items():
        if gradient is not None:
            torch.testing.assert_close(got[name], gradient, rtol=1e-3, atol=1e-4, msg=name)


def test_probe_then_plan_then_fp8(x: torch.Tensor) -> None:
    model = Net()
    compiled = compile_(model, FP8)
    with loka_compile.explain() as report:
        losses = train(model, compiled, 12, x)
    assert all(b < a for a, b in itertools.pairwise(losses)), losses
    plan = loka_compile.plan_of(model)
    assert set(plan.sites) == {"net.0", "net.3", "projection"}
    for site in plan.sites.values():
        assert all(kernel != "high_precision" for kernel in site.kernels), site
        assert 0.02 < site.choice("fwd").mere_clamped < 0.12
    rows = {row["name"]: row for row in report.sites}
    assert rows["head"]["directions"]["fwd"]["reason"] == "a head stays in high precision"
    assert rows["net.0"]["fused"] == "net.0+block_norm+hard_swish"
    # The step after the swap computes FP8: close to high precision, and not equal to it.
    high = modded(model, x)
    error = (compiled(x) - high).norm() / high.norm()
    assert 1e-3 < error < 0.2


def test_plan_is_in_force_from_the_ninth_step(x: torch.Tensor) -> None:
    model = Net()
    compiled = compile_(model, FP8)
    active = []
    for _ in range(10):
        compiled(x).sum().backward()
        active.append(loka_compile.plan_of(model).active)
    assert active == [False] * 8 + [True] * 2


def test_statistics_are_those_of_the_real_input_and_gradient(x: torch.Tensor) -> None:
    model = Net()
    compiled = compile_(model, FP8)
    for _ in range(8):
        y = compiled(x)
        y.sum().backward()
    entry = LEDGER.find(model.projection)
    assert entry is not None
    seen_x, seen_g = entry.statistics[(0, "x")], entry.statistics[(0, "g")]
    h = F.hardswish(model.net[3].weight.new_zeros(1))
    assert seen_x.batches == seen_g.batches == 8 and h.item() == 0
    # d sum(head(h @ P)) / d(h @ P) is the head's weight, for every row.
    torch.testing.assert_close(seen_g.reservoir()[0], model.head.weight[0].detach())
    first = LEDGER.find(model.net[0].weight)
    assert first is not None
    torch.testing.assert_close(
        first.statistics[(0, "x")].mean().float(), x.mean(0), rtol=1e-4, atol=1e-5
    )


def test_eval_uses_the_plan_of_training(x: torch.Tensor) -> None:
    model = Net()
    compiled = compile_(model, FP8)
    train(model, compiled, 10, x)
    trained = compiled(x)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), trained.detach(), rtol=1e-5, atol=1e-6)


def test_autocast_dynamic_batch_and_ranks() -> None:
    model = Net()
    compiled = compile_(model, FP8)
    for shape in [(48, 32), (48, 32), (17, 32), (33, 32), (3, 5, 32), (32,), (1, 32), (0, 32)]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = compiled(torch.randn(shape))
        assert y.shape == (*shape[:-1], 1) and y.dtype == torch.bfloat16
        y.float().sum().backward()
        assert torch.isfinite(model.projection.grad).all()


def test_dynamic_batches_after_the_plan_agree_with_the_reference(x: torch.Tensor) -> None:
    """Sizes that are no multiple of 16 go through one symbolic graph and zero-filled wgrads."""
    model = Net()
    compiled = compile_(model, FP8, dynamic=True)
    train(model, compiled, 10, x)
    assert loka_compile.plan_of(model).active
    for rows in (16, 17, 31, 47):
        part = torch.randn(rows, 32)
        model.zero_grad()
        y = compiled(part)
        y.square().sum().backward()
        got = model.projection.grad.clone()
        model.zero_grad()
        reference = modded(model, part)
        reference.square().sum().backward()
        assert (y - reference).norm() < 0.15 * reference.norm(), rows
        assert (got - model.projection.grad).norm() < 0.2 * got.norm(), rows


class Odd(nn.Module):
    """Nested modules, a shared linear, a checkpointed block, a Parameter matmul, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleDict(
            {
                "user": nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.SiLU()),
                "item": nn.Sequential(nn.Linear(32, 64), nn.RMSNorm(64), nn.ReLU()),
            }
        )
        self.shared = nn.Linear(64, 64)
        self.deep = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())
        self.mix = nn.Parameter(torch.randn(64, 48) * 0.1)
        self.heads = nn.ModuleList([nn.Linear(48, 1), nn.Linear(48, 2)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.shared(self.tower["user"](x)) + self.shared(self.tower["item"](x))
        h = checkpoint(self.deep, h, use_reentrant=False)
        h = h @ self.mix
        return tuple(head(h) for head in self.heads)


def test_a_model_with_everything_compiles_trains_and_reports(x: torch.Tensor) -> None:
    model = Odd()
    compiled = compile_(model, FP8)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    with loka_compile.explain() as report:
        for _ in range(14):
            a, b = compiled(x)
            loss = a.square().mean() + (b - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    names = {row["name"] for row in report.sites}
    assert names == {
        "tower.user.0",
        "tower.item.0",
        "shared",
        "shared#1",
        "deep.0",
        "mix",
        "heads.0",
        "heads.1",
    }
    plan = loka_compile.plan_of(model)
    assert set(plan.sites) == names - {"heads.0", "heads.1"}
    assert "checkpoint" in report.text() or "deep.0" in report.text()


def test_frozen_layers_get_no_gradient_and_train_around(x: torch.Tensor) -> None:
    model = Net()
    for parameter in model.net[0].parameters():
        parameter.requires_grad_(False)
    compiled = compile_(model, FP8)
    train(model, compiled, 10, x)
    assert model.net[0].weight.grad is None
    assert loka_compile.plan_of(model).active


def test_state_dict_and_identity_are_untouched(x: torch.Tensor) -> None:
    model = Net()
    before = {n: id(p) for n, p in model.named_parameters()}
    keys = list(model.state_dict())
    train(model, compile_(model, FP8), 10, x)
    assert {n: id(p) for n, p in model.named_parameters()} == before
    assert list(model.state_dict()) == keys


def test_without_fp8_hardware_sites_say_why(x: torch.Tensor) -> None:
    model = Net()
    compiled = compile_(model, {**QUICK, "mods": "on"})
    with loka_compile.explain() as report:
        train(model, compiled, 10, x)
    reason = report.sites[0]["directions"]["fwd"]["reason"]
    assert "no FP8 hardware on cpu" in reason and "emulate=True" in reason
    assert not loka_compile.plan_of(model).active


def test_exclude_force_and_heads(x: torch.Tensor) -> None:
    model = Net()
    options = {
        **FP8,
        "exclude": ["net.0"],
        "force": {"projection": {"wgrad": "high_precision", "fwd": "torchao:tensorwise"}},
        "heads": ["net.3"],
    }
    compiled = compile_(model, options)
    with loka_compile.explain() as report:
        train(model, compiled, 10, x)
    rows = {row["name"]: row["directions"] for row in report.sites}
    assert rows["net.0"]["fwd"]["reason"] == "excluded by option"
    assert rows["net.3"]["fwd"]["reason"] == "a head stays in high precision"
    assert rows["projection"]["fwd"]["kernel"] == "torchao:tensorwise"
    assert rows["projection"]["wgrad"]["kernel"] == "high_precision"
    compiled(x).sum().backward()
    assert model.net[3].bias.grad is not None and model.net[0].bias.grad is None


@pytest.mark.parametrize("option", ["exclude", "heads"])
def test_a_pattern_that_matches_nothing_is_an_error(option: str, x: torch.Tensor) -> None:
    compiled = compile_(Net(), {**FP8, option: ["no.such.layer"]})
    with pytest.raises(Exception, match=r"no\.such\.layer.*matches no GEMM site"):
        compiled(x)


def test_unknown_option_through_torch_compile(x: torch.Tensor) -> None:
    compiled = compile_(Net(), {"emulat": True})
    with pytest.raises(Exception, match=r"unknown option 'emulat'; did you mean 'emulate'"):
        compiled(x)


def test_kill_switch(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOKA_DISABLE", "1")
    model = Net()
    y = compile_(model, FP8)(x)
    torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-6)


def test_a_failing_pass_leaves_the_model_running(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from loka_compile.passes.fuse import Fuse

    def broken(self, gm, context):
        raise RuntimeError("planted")

    monkeypatch.setattr(Fuse, "__call__", broken)
    model = Net()
    with caplog.at_level(logging.WARNING, "loka_compile"):
        y = compile_(model, FP8)(x)
    torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-6)
    assert "planted" in caplog.text and "compiled as written" in caplog.text


def test_second_order_gradients_are_refused(x: torch.Tensor) -> None:
    model = Net()
    y = compile_(model, FP8)(x.requires_grad_())
    with pytest.raises(RuntimeError):
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        g.sum().backward()
