"""Weights quantised once per training step, through the whole backend."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import loka_compile
from loka_compile import variant
from loka_compile.lowering import weight_groups
from loka_compile.lowering.recipes import HIGH_PRECISION as HIGH
from loka_compile.passes.share_weights import ShareWeights

T = "torch:tensorwise"
QUANTIZE = "quantize_weights"
OWN = {"fwd": "loka:tensorwise", "dgrad": T, "wgrad": T}


pytestmark = pytest.mark.usefixtures("fp8_anywhere")


class Model(nn.Module):
    """A first layer without dgrad; widths that are no multiples of 16; weights stored [K, N], the
    first of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 64)
        self.norm = nn.LayerNorm(64)
        self.chain = nn.Linear(64, 64)
        self.odd = nn.Linear(64, 40)
        self.turned = nn.Parameter(torch.randn(40, 40) / 6)
        self.last = nn.Parameter(torch.randn(40, 32) / 6)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = nn.functional.silu(self.norm(self.chain(x)))
        x = torch.relu(torch.relu(self.odd(x)) @ self.turned) @ self.turned
        return torch.relu(x) @ self.last


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


def agree(mine, theirs) -> None:
    """Outputs and gradients, bit for bit."""
    (y, grads, _), (want, want_grads, _) = mine, theirs
    assert torch.equal(y, want)
    for name, gradient in want_grads.items():
        if gradient is None:
            assert grads[name] is None
        else:
            assert torch.equal(grads[name], gradient), name


@pytest.mark.parametrize("autocast", [False, True])
def test_same_step_with_fewer_quantisations(device, monkeypatch, autocast) -> None:
    torch.manual_seed(0)
    model = Model().to(device)
    other = copy.deepcopy(model)
    x = torch.randn(40, 48, device=device)
    mine = step(model, x, ("cpu", "cuda"), monkeypatch, autocast)
    # All but the first layer, whose input needs no gradient: those stored [N, K], and the others.
    assert mine[-1].count("loka.quantize_weights.default(") == 2
    assert "loka.quantize_weight.default(" not in mine[-1]
    agree(mine, step(other, x, (), monkeypatch, autocast))


def test_groups_are_bounded(device, monkeypatch) -> None:
    torch.manual_seed(0)
    model = Model().to(device)
    other = copy.deepcopy(model)
    x = torch.randn(40, 48, device=device)
    grouped = step(model, x, ("cpu", "cuda"), monkeypatch)
    # The chain's weight alone fills a group, as do the two uses of the one that is stored [K, N].
    monkeypatch.setattr(weight_groups, "MOST_BYTES", 2 * 64 * 64)
    mine = step(other, x, ("cpu", "cuda"), monkeypatch)
    assert mine[-1].count("loka.quantize_weights.default(") == 1
    assert mine[-1].count("loka.quantize_weight.default(") == 3
    agree(mine, grouped)


def test_a_probed_step_shares_them_too(device, monkeypatch) -> None:
    """What a probed step costs is for observers, not for weights quantised one by one."""
    torch.manual_seed(0)
    model = Model().to(device)
    step(model, torch.randn(40, 48, device=device), ("cpu", "cuda"), monkeypatch)
    plan = loka_compile.plan_of(model)
    seen = []

    class Spy(ShareWeights):
        def __call__(self, gm, context) -> None:
            super().__call__(gm, context)
            names = [str(node.target) for node in gm.graph.nodes]
            seen.append([names.count(f"loka.{op}.default") for op in ("observe", QUANTIZE)])

    def run(devices) -> list[torch.Tensor]:
        """Results of the last of some steps, which is probed."""
        torch._dynamo.reset()
        monkeypatch.setattr(variant, "ShareWeights", functools.partial(Spy, devices))
        how = {"mods": "on", "inner": "aot_eager", "libraries": ("loka", "torch")}
        options = {**how, "plan": plan, "probe_every": 1}
        compiled = torch.compile(model, backend="loka", options=options)
        torch.manual_seed(1)
        for _ in range(12):
            x = torch.randn(40, 48, device=device, requires_grad=True)
            model.zero_grad()
            y = compiled(x)
            y.float().square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    shared = run(("cpu", "cuda"))
    (observers, groups) = seen[-1]
    assert observers and groups == 2
    for mine, theirs in zip(shared, run(()), strict=True):
        assert torch.equal(mine, theirs)
    assert seen[-1] == [observers, 0]


@pytest.mark.slow
def test_inductor_quantises_once_and_keeps_it_for_the_backward(device, monkeypatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3))).to(device)
    other = copy.deepcopy(model)
    x = torch.randn(40, 32, device=device)
    options = {"force": {"*": T}, "mods": "off"}
    mine, codes = run_and_get_code(
        lambda: step(model, x, ("cpu", "cuda"), monkeypatch, inner="inductor", **options)
    )
    forward, *backward = [code for code in codes if "def call" in code]
    assert forward.count(f"quantize_weights.default.on_{device.type}(") == 1
    assert backward and not any("quantize_weights" in code for code in backward)
    want = step(other, x, (), monkeypatch, **options)
    for got, expected in ((mine[0], want[0]), *((mine[1][n], w) for n, w in want[1].items())):
        assert (got - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.gpu
@pytest.mark.slow
def test_cuda_graphs_follow_the_weights(monkeypatch) -> None:
    """Replayed graphs read parameters that an optimizer has changed in place, and results that
    share memory outlive the forward."""
    torch.manual_seed(0)
    x = torch.randn(64, 32, device="cuda")
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4))).to("cuda")

    def losses(devices: tuple[str, ...], mode: str | None) -> list[float]:
        torch._dynamo.reset()
        monkeypatch.setattr(variant, "ShareWeights", functools.partial(ShareWeights, devices))
        own = copy.deepcopy(model)
        options = {"mods": "off", "force": {"*": T}, "mode": mode}
        compiled = torch.compile(own, backend="loka", options=options)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.3)
        found = []
        for _ in range(14):
            torch.compiler.cudagraph_mark_step_begin()
            loss = (compiled(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    want = losses((), None)
    assert want[-1] < want[0]
    assert losses(("cuda",), None) == pytest.approx(want, rel=1e-3)
    assert losses(("cuda",), "reduce-overhead") == pytest.approx(want, rel=1e-3)


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
