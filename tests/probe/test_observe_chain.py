"""A probed step keeps the fused backward: what observers want of a chain is made when one asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import loka_compile
from loka_compile.ledger import LEDGER
from loka_compile.lowering.chain_formulas import block_norm_act_backward
from loka_compile.options import Options
from loka_compile.probe import chains
from loka_compile.probe import turns

T = "torch:tensorwise"
FORCE = {"*": T, "chain": {"fwd": "loka:tensorwise", "dgrad": T, "wgrad": T}}
HOW: dict[str, Any] = {"mods": "on", "inner": "aot_eager", "libraries": ("loka", "torch")}


pytestmark = pytest.mark.usefixtures("fp8_anywhere")


class Model(nn.Module):
    """Nobody takes the chain's result as e4m3: a probed step does not, and would not be equal."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 64)
        self.chain = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.last = nn.Linear(64, 32)

    def forward(self, x):
        x = nn.functional.silu(self.norm(self.chain(torch.relu(self.first(x)))))
        return torch.relu(self.last(torch.relu(x)))


def compiled_of(model: nn.Module, **options: Any):
    torch._dynamo.reset()
    return torch.compile(model, backend="loka", options={**HOW, **options})


def names_of(step) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return [event.name for event in profile.events() or ()]


def train(model: nn.Module, device: torch.device, **options: Any):
    """(ops of the last step, its gradients, statistics of the chain's gradient) of probed steps."""
    held = LEDGER.entry(model.chain.weight).statistics
    held.clear()
    compiled = compiled_of(model, **options)
    torch.manual_seed(1)
    dtype = model.chain.weight.dtype
    x = torch.randn(40, 48, device=device, dtype=dtype, requires_grad=True)

    def step() -> None:
        model.zero_grad()
        x.grad = None
        y = compiled(x)
        (y.float() * torch.arange(32, device=device)).square().mean().backward()

    for _ in range(14):
        step()
    names = names_of(step)
    state = held.get((0, "g"))
    seen = [] if state is None else [t.clone() for t in state.tensors]
    return (
        names,
        [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)],
        seen,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_records_and_the_gradients_of_a_plain_step(device, monkeypatch, dtype) -> None:
    torch.manual_seed(0)
    model = Model().to(device, dtype)
    compiled_of(model, force=FORCE)(
        torch.randn(40, 48, device=device, dtype=dtype)
    ).sum().backward()
    plan = loka_compile.plan_of(model)
    # All are asked at every turn, so that both see the same.
    monkeypatch.setattr(turns, "SITES", 100)
    mine = train(model, device, plan=plan, probe_every=1)
    plain = train(model, device, plan=plan, probe_every=0)
    monkeypatch.setattr(Options, "probes_in_turn", property(lambda self: False))
    apart = train(model, device, plan=plan, probe_every=1)
    assert "loka::observe_chain" in mine[0] and "loka::fused_chain_backward" in mine[0]
    assert "loka::observe_chain" not in apart[0] and "loka::observe_coherence" in apart[0]
    assert "loka::fused_chain_backward" not in apart[0]
    assert mine[2] and not plain[2]
    if dtype == torch.float32:
        for a, b in zip(mine[2], apart[2], strict=True):
            # On a GPU a kernel sums a row in another order: what cancels differs by more.
            least = 1e-6 * float(b.nan_to_num(0.0, 0.0, 0.0).abs().max()) if b.is_cuda else 0.0
            torch.testing.assert_close(a, b, rtol=1e-6, atol=least, equal_nan=True)
    for a, b in zip(mine[1], plain[1], strict=True):
        assert torch.equal(a, b)


def test_a_site_that_rests_computes_nothing(device, monkeypatch) -> None:
    torch.manual_seed(0)
    model = Model().to(device)
    compiled_of(model, force=FORCE)(torch.randn(40, 48, device=device)).sum().backward()
    plan = loka_compile.plan_of(model)
    monkeypatch.setattr(turns, "SITES", 1)
    x = torch.randn(40, 48, device=device)
    compiled = compiled_of(model, plan=plan, probe_every=1)
    for _ in range(10):
        compiled(x).sum().backward()
    held = LEDGER.entry(model.chain.weight).statistics[0, "g"]
    made, gradient_of = [], chains.gradient_of
    monkeypatch.setattr(chains, "gradient_of", lambda *a: made.append(a) or gradient_of(*a))
    turned = set()
    for _ in range(6):
        before = float(held.scalars[0])
        made.clear()
        names = names_of(lambda: compiled(x).sum().backward())
        assert "loka::observe_chain" in names
        asked = float(held.scalars[0]) > before
        assert asked == bool(made)
        turned.add(asked)
    assert turned == {True, False}


class Chained(nn.Module):
    """Two chains in a row, whose results only FP8 linears read, and a norm in front of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.first = nn.Sequential(nn.Linear(48, 64), nn.LayerNorm(64), nn.SiLU())
        self.chain = nn.Linear(64, 64)
        self.after = nn.LayerNorm(64)
        self.last = nn.Linear(64, 32)
        nn.init.uniform_(self.first[1].weight, 0.5, 1.5)

    def forward(self, x):
        x = self.chain(self.first(self.norm(x)))
        return self.last(nn.functional.silu(self.after(x)))


CHAIN = {"fwd": "loka:tensorwise", "dgrad": T, "wgrad": T}
FORCE_CHAINED = {"first.0": CHAIN, "chain": CHAIN, "last": T}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hand_overs_stay_in_a_probed_step(device, monkeypatch, dtype) -> None:
    torch.manual_seed(0)
    model = Chained().to(device, dtype)
    x = torch.randn(40, 48, device=device, dtype=dtype)
    compiled_of(model, force=FORCE_CHAINED, heads=())(x).sum().backward()
    plan = loka_compile.plan_of(model)
    sites = {name: getattr(model, name) for name in ("chain", "last")} | {"first.0": model.first[0]}

    def seen(**options: Any):
        held = {name: LEDGER.entry(layer.weight).statistics for name, layer in sites.items()}
        for one in held.values():
            one.clear()
        gradients = train(model, device, plan=plan, heads=(), **options)[1]
        return gradients, {(n, r): one[0, r] for n, one in held.items() for r in "xg" if one}

    monkeypatch.setattr(turns, "SITES", 100)
    with loka_compile.explain() as report:
        mine, held = seen(probe_every=1)
    assert len(held) == 6
    assert report.diff("handover").count("'y8t'") >= 2
    plain, nothing = seen(probe_every=0)
    assert not nothing
    # The same kernels ran: not one bit differs from a plain step.
    for a, b in zip(mine, plain, strict=True):
        assert torch.equal(a, b)
    monkeypatch.setattr(Options, "probes_in_turn", property(lambda self: False))
    _, apart = seen(probe_every=1)
    # Those took values before they were quantised, of a forward with other scales.
    for key, one in held.items():
        other = apart[key]
        assert one.batches == other.batches > 0
        assert float(one.scalars[0]) == float(other.scalars[0])
        close = {"rtol": 0.08, "atol": 0.0}
        torch.testing.assert_close(
            one.moments[1].sum().sqrt(), other.moments[1].sum().sqrt(), **close
        )
        torch.testing.assert_close(one.scalars[6], other.scalars[6], **close)
    # What is told of an input is the value before it was rounded to e4m3.
    rows = held["chain", "x"].reservoir().float()
    assert len(rows) > 0
    rounded = rows.to(torch.float8_e4m3fn).float()
    assert (rows == rounded).float().mean() < 0.5
    for key in (("chain", "g"), ("last", "g"), ("first.0", "g")):
        assert held[key].recorded_coherence() is not None, key


def test_a_gradient_is_computed_some_rows_at_a_time(device, monkeypatch) -> None:
    torch.manual_seed(0)
    gy, u = torch.randn(5, 9, 96, device=device), torch.randn(5, 9, 96, device=device)
    r, gain = torch.rand(5, 9, 3, device=device), torch.rand(96, device=device)
    how = (gy, u, r, gain, 32, "hard_swish", True)
    whole, _ = block_norm_act_backward(*how)
    monkeypatch.setattr(chains, "ROWS", 7)
    monkeypatch.setattr(chains, "_FAILED", ["plain torch"])
    assert torch.equal(chains.gradient_of(*how), whole.reshape(-1, 96))
