"""BF16 as a gated kernel of float32 layers: values, gradients, plan, report, weight cache."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loka_compile import _compat
from loka_compile import eligibility
from loka_compile import explain
from loka_compile import loka_backend
from loka_compile import plan_of
from loka_compile.kernels import block_norm as bn
from loka_compile.kernels.hard_swish import hard_swish
from loka_compile.lowering import chain
from loka_compile.lowering import choose_sites
from loka_compile.lowering import entries
from loka_compile.lowering import first_use
from loka_compile.lowering import gemm
from loka_compile.lowering import part_workloads
from loka_compile.lowering import select
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.libraries.bf16 import Bf16
from loka_compile.lowering.measure import Cost
from loka_compile.lowering.parts import Place
from loka_compile.lowering.parts import backward_parts
from loka_compile.lowering.parts import forward_parts
from loka_compile.lowering.parts import guess_us
from loka_compile.lowering.parts import parse_pair
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.options import Options

KERNEL = "bf16:plain"
CPU = torch.device("cpu")


@pytest.fixture
def here(monkeypatch):
    """bf16 products run on a CPU too; they are only not offered there."""
    monkeypatch.setattr(_compat, "why_no_bf16", lambda device: None)
    torch._dynamo.reset()


def close(got, want, bits: float = 3.0) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    assert (got - want).norm() < bits * 2**-8 * want.norm()
    assert not torch.equal(got, want)


# Odd sizes: nothing is padded, for nothing asks for multiples of 16.
@pytest.mark.parametrize("shape", [(17, 37, 5), (64, 128, 48), (1, 3, 1)])
@pytest.mark.parametrize("kernel", [KERNEL, KERNEL + EMULATED])
def test_three_products(shape, kernel) -> None:
    m, k, n = shape
    x, w, gy = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    close(gemm.forward(x, w, kernel), x @ w.t())
    close(gemm.dgrad(gy, w, kernel), gy @ w)
    close(gemm.wgrad(gy, x, kernel), gy.t() @ x)
    assert gemm.forward(x[:0], w, kernel).shape == (0, n)
    assert not gemm.wgrad(gy[:0], x[:0], kernel).any()


def test_range_and_bad_rows_are_those_of_float32() -> None:
    x = torch.randn(4, 32) * torch.tensor([[1e30], [1e-30], [0.0], [1.0]])
    x[3, 0] = float("nan")
    y = gemm.forward(x, torch.randn(8, 32), KERNEL)
    assert torch.isfinite(y[:3]).all() and y[3].isnan().all()
    assert (y[:2] != 0).all() and not y[2].any()


def test_who_may_take_it(here) -> None:
    shape = GemmShape(64, 128, 7)

    def names(dtype, options=None):
        return select.candidates("fwd", shape, CPU, options or Options(), dtype)[0]

    assert names(torch.float32) == [KERNEL]
    # A layer that computes in bf16 runs in bf16 as it is, and emulation is there for FP8.
    assert names(torch.bfloat16) == names(torch.float64) == names(None) == []
    assert KERNEL not in names(torch.float32, Options(emulate=True))
    assert names(torch.float32, Options(emulate=True, libraries=("bf16",))) == [KERNEL]
    assert names(torch.float32, Options(libraries=("torch",))) == []
    assert Bf16().why_not("plain", "fwd", GemmShape(64, 0, 8)).startswith("K = 0")
    assert first_use.why_failed(KERNEL, "wgrad", shape, torch.float32, CPU) is None


def test_not_offered_on_a_cpu() -> None:
    names, reasons = select.candidates("fwd", GemmShape(64, 128, 64), CPU, Options(), torch.float32)
    assert names == [] and len(reasons) == 2 and "no FP8 hardware on cpu" in reasons[0]
    assert eligibility.runnable(KERNEL, CPU, Options()) == HIGH_PRECISION


class Good:
    mere = mere_clamped = mere_clamped_upper = 0.003
    bad_rows = bad_rows_upper = 0.0
    non_finite, samples = 0, 8


class Prices:
    """What `SitePrices` answers: high precision takes 10 us, bf16 takes `us`."""

    def __init__(self, us: float) -> None:
        self.us = us

    def alone(self, direction, kernel):
        return Cost(10.0 if kernel == HIGH_PRECISION else self.us, "table")

    def fwd(self, kernel, handed=False):
        return None if handed else self.alone("fwd", kernel)

    def back(self, direction, kernel, ready=False, x="plain"):
        return self.alone(direction, kernel) if not ready and x == "plain" else None

    def gradient(self, rules):
        return None

    def bounded(self, turned):
        return None

    def saved(self, tensor, rules):
        return Cost(0.0, "")


@pytest.mark.parametrize(("us", "chosen"), [(5.0, KERNEL), (9.9, HIGH_PRECISION)])
def test_it_must_be_faster_and_accurate(us, chosen, here) -> None:
    def choices(errors):
        prices = Prices(us)
        offers = choose_sites.offers_of(
            "a", GemmShape(64, 128, 64), CPU, Options(), lambda *_: errors, prices,
            dtype=torch.float32,
        )  # fmt: skip
        return choose_sites.choose_sites({"a": offers}, {}, Options(), {"a": prices})["a"]

    for choice in choices(Good()).values():
        assert choice.kernel == chosen and (chosen == KERNEL or "speedup 1.01" in choice.reason)
        assert choice.is_low == (chosen == KERNEL) and not choice.is_fp8
    bad = Good()
    bad.mere_clamped_upper = 0.3
    assert all("MERE" in c.reason and not c.is_low for c in choices(bad).values())


def test_its_parts_have_keys_and_workloads() -> None:
    """A cast for each operand, and the product of operands that are cast already."""
    place = Place(GemmShape(32, 48, 16), torch.float32, CPU)
    for direction in DIRECTIONS:
        parts = (
            forward_parts(place, KERNEL)
            if direction == "fwd"
            else backward_parts(place, direction, KERNEL)
        )
        assert [p.direction for p in parts] == [direction, "quantise", "quantise"]
        for part in parts:
            if part.direction == "quantise":
                assert [r.scaled for r in parse_pair(part.recipe) if r] == [False]
                assert guess_us(part, 4) > 0
                function, arguments = part_workloads.moving(part, torch.float32, CPU)
                assert function(*arguments)[0].dtype == torch.bfloat16
            else:
                function, arguments = part_workloads.kernel_alone(part, torch.float32, CPU)
                assert function(*arguments).dtype == torch.float32


def run(model, x, steps=10, **options):
    chosen = {"inner": "aot_eager", "mods": "off", "heads": (), "tune": "never", **options}
    compiled = torch.compile(model, backend=loka_backend, options=chosen)
    for _ in range(steps):
        model.zero_grad()
        x.grad = None
        y = compiled(x)
        (y.square().sum() + y.sum()).backward()
    gradients = [one.grad if one.grad is None else one.grad.clone()
                 for one in (*model.parameters(), x)]  # fmt: skip
    return y.detach(), gradients


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(48, 64), nn.LayerNorm(64), nn.Linear(64, 24)

    def forward(self, x):
        return self.b(nn.functional.silu(self.norm(self.a(x))))


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mods", ["off", "on"])
def test_a_float32_model_takes_it(mods, inner, here) -> None:
    """Outside a fused chain, and inside one."""
    model, x = Chain(), torch.randn(40, 48, requires_grad=True)
    with explain() as report:
        y, gradients = run(model, x, mods=mods, inner=inner, min_speedup=0)
    sites = plan_of(model).sites
    assert {s.kernels for s in sites.values()} == {(KERNEL,) * 3}
    assert (sites["a"].fused is not None) == (mods == "on")
    assert all(0 < c.mere_clamped < 0.05 for s in sites.values() for c in s.directions.values())
    text = report.text()
    assert KERNEL in text and "2 BF16 sites" in text and "2 x runs in bf16" in text

    if mods == "on":
        u, _ = bn.normalize(x @ model.a.weight.t(), 64, model.norm.eps)
        want = hard_swish(u) @ model.b.weight.t() + model.b.bias * 0
    else:
        want = model(x)
    close(y, want.detach(), 4)
    model.zero_grad()
    x.grad = None
    (want.square().sum() + want.sum()).backward()
    for got, parameter in zip(gradients, [*model.parameters(), x], strict=True):
        if parameter.grad is not None and parameter.grad.any():
            assert got is not None
            assert got.dtype == torch.float32
            assert (got - parameter.grad).norm() < 0.03 * parameter.grad.norm()


def test_bf16_models_and_autocast_do_not(here) -> None:
    model, x = Chain().bfloat16(), torch.randn(40, 48, dtype=torch.bfloat16, requires_grad=True)
    run(model, x, min_speedup=0)
    assert not any(c.is_low for s in plan_of(model).sites.values() for c in s.directions.values())


def test_weights_are_cast_once_for_inference(here) -> None:
    model, x = Chain(), torch.randn(40, 48)
    options = {"inner": "aot_eager", "mods": "off", "force": {"*": KERNEL}}
    compiled = torch.compile(model, backend=loka_backend, options=options)
    with torch.no_grad():
        for _ in range(2):
            close(compiled(x), model(x), 4)
            model.a.weight.mul_(2)
    from loka_compile.ledger import LEDGER

    (stored,) = LEDGER.find(model.a.weight).stored.values()
    assert stored.q.dtype == torch.bfloat16 and stored.scale.shape == ()
    assert torch.equal(stored.q.float() * 2, model.a.weight.detach().bfloat16().float())


def test_it_takes_no_part_in_hand_overs() -> None:
    assert chain.backward_rules("loka:tensorwise", KERNEL, KERNEL) is None
    assert chain.gradient_rule("dgrad", KERNEL) is None
    assert not any(entries.takes_e4m3(KERNEL, d) for d in DIRECTIONS)
    assert not entries.hands_over(KERNEL)


@pytest.mark.gpu
def test_a_float32_model_on_a_gpu() -> None:
    """Timed against float32 products, which are slower on every GPU that multiplies bf16."""
    torch._dynamo.reset()
    device = torch.device("cuda")
    # Smooth: a rounding that flips a ReLU changes a whole gradient.
    model = nn.Sequential(nn.Linear(2048, 2048), nn.SiLU(), nn.Linear(2048, 2048)).to(device)
    x = torch.randn(4096, 2048, device=device, requires_grad=True)
    y, gradients = run(model, x, inner="inductor", tune="auto", libraries=("bf16",))
    for site in plan_of(model).sites.values():
        for direction in DIRECTIONS:
            choice = site.choice(direction)
            assert choice.kernel == KERNEL and choice.speedup > 1.05, choice
            assert choice.us > 0 and choice.mere_clamped < 0.05
    want = model(x)
    close(y, want.detach(), 4)
    model.zero_grad()
    x.grad = None
    (want.square().sum() + want.sum()).backward()
    for got, parameter in zip(gradients, [*model.parameters(), x], strict=True):
        assert (got - parameter.grad).norm() < 0.03 * parameter.grad.norm()
