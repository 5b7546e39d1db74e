"""Choices over all sites: prices per direction, hand-overs along a chain."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loka_compile.lowering import choose_sites
from loka_compile.lowering.choose_sites import Found
from loka_compile.lowering.entries import Outcome
from loka_compile.lowering.libraries import LIBRARIES
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.measure import Cost
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.options import Options
from loka_compile.probe.quantify import Errors

CPU = torch.device("cpu")
SHAPE = GemmShape(32, 64, 48)
GOOD = Errors(0.1, 0.05, 0.06, 0.0, 0.0, 28.0, 0.04, non_finite=0, samples=8)
BAD = replace(GOOD, mere_clamped=0.5, mere_clamped_upper=0.6)
REAL = Options()
EMULATE = Options(emulate=True)


def _never(*_: str) -> None:
    raise AssertionError("a forced direction is not measured")


class Prices:
    """Prices out of a function (direction, kernel, handed) -> Cost, with nothing shared."""

    def __init__(self, cost) -> None:
        self.cost = cost

    def alone(self, direction, kernel):
        return self.cost(direction, kernel, False)

    def fwd(self, kernel, handed=False):
        return self.cost("fwd", kernel, handed)

    def back(self, direction, kernel, *, ready=False, x="plain"):
        return self.cost(direction, kernel, x == "handed")

    def gradient(self, rules):
        return None

    def bounded(self, turned):
        return None

    def saved(self, tensor, rules):
        return Cost(0.0, "")


def test_forced_choice_is_not_measured():
    options = Options(force={"*": "torchao:rowwise"})
    chosen = choose_sites.choose_site("a", SHAPE, CPU, options, _never, Prices(_never))
    for direction in DIRECTIONS:
        choice = chosen[direction]
        assert (choice.kernel, choice.library, choice.recipe) == (
            "torchao:rowwise",
            "torchao",
            "rowwise",
        )
        assert choice.source == "forced"


def test_forced_on_a_shape_that_cannot_run_stays_high():
    """A head of width 1 under force={"*": ...}: no crash in the kernel, and the reason is said."""
    options = Options(force={"*": "torch:rowwise"})
    chosen = choose_sites.choose_site(
        "a", GemmShape(32, 64, 1), CPU, options, _never, Prices(_never)
    )
    for direction in DIRECTIONS:
        assert not chosen[direction].is_fp8
        assert "forced torch:rowwise: N = 1" in chosen[direction].reason
    options = Options(force={"*": "torchao:rowwise_with_gw_hp"})
    chosen = choose_sites.choose_site("a", SHAPE, CPU, options, _never, Prices(_never))
    assert chosen["fwd"].is_fp8 and not chosen["wgrad"].is_fp8
    options = Options(force={"*": HIGH_PRECISION})
    chosen = choose_sites.choose_site("a", SHAPE, CPU, options, _never, Prices(_never))
    assert {c.library for c in chosen.values()} == {"torch"}


def test_every_direction_is_chosen_on_its_own():
    def quantify(direction: str, kernel: str) -> Errors:
        return BAD if direction == "wgrad" else GOOD

    chosen = choose_sites.choose_site("a", SHAPE, CPU, EMULATE, quantify, None)
    assert chosen["fwd"].is_fp8 and chosen["dgrad"].is_fp8 and not chosen["wgrad"].is_fp8


def test_every_direction_is_compared_with_high_precision():
    timed: list[tuple[str, str]] = []

    def cost(direction: str, kernel: str, handed: bool) -> Cost:
        timed.append((direction, kernel))
        return Cost(10.0 if kernel == HIGH_PRECISION else 5.0, "table")

    # min_speedup as it is, "real" kernels: pretend that the CPU can run them.
    with pytest.MonkeyPatch.context() as patch:
        for library in LIBRARIES.values():
            patch.setattr(library, "why_unavailable", lambda device: None, raising=False)
            patch.setattr(library, "why_no_recipe", lambda recipe, device: None, raising=False)
        chosen = choose_sites.choose_site("a", SHAPE, CPU, REAL, lambda *_: GOOD, Prices(cost))
    assert {d for d, k in timed if k == HIGH_PRECISION} == set(DIRECTIONS)
    assert all(c.speedup == 2.0 and c.source == "table" for c in chosen.values())


@pytest.fixture
def real_kernels(monkeypatch):
    """Pretend that this device runs everything, and that `torchao` kernels hand over."""
    for library in LIBRARIES.values():
        monkeypatch.setattr(library, "why_unavailable", lambda device: None, raising=False)
        monkeypatch.setattr(library, "why_no_recipe", lambda recipe, device: None, raising=False)
    monkeypatch.setattr(LIBRARIES["torchao"], "hands_over", True, raising=False)


def test_a_producer_gives_way_for_a_hand_over(real_kernels):
    """torch:rowwise is the fastest on its own; torchao's e4m3 output makes the pair faster."""
    us = {
        ("torch:rowwise", False): 5.0,
        ("torchao:rowwise", False): 5.5,
        ("torchao:rowwise", True): 3.0,
    }

    def cost(direction: str, kernel: str, handed: bool) -> Cost | None:
        if kernel == HIGH_PRECISION:
            return Cost(10.0, "table")
        return Cost(us.get((kernel, handed), 9.0), "table")

    one = choose_sites.offers_of("a", SHAPE, CPU, REAL, lambda *_: GOOD, Prices(cost))
    both, prices = {"a": one, "b": one}, {"a": Prices(cost), "b": Prices(cost)}
    alone = choose_sites.choose_sites(both, {}, REAL, prices)
    assert [alone[s]["fwd"].kernel for s in "ab"] == ["torch:rowwise", "torch:rowwise"]
    chained = choose_sites.choose_sites(both, {"b": "a"}, REAL, prices)
    assert [chained[s]["fwd"].kernel for s in "ab"] == ["torchao:rowwise", "torchao:rowwise"]
    assert chained["b"]["fwd"].us == 3.0 and chained["a"]["fwd"].us == 5.5
    # dgrad does not read the input.
    assert chained["b"]["dgrad"].kernel == "torch:rowwise"


def test_a_failed_kernel_is_no_candidate(real_kernels):
    def cost(direction: str, kernel: str, handed: bool) -> Cost | None:
        if kernel == "torch:rowwise":
            return Cost(None, "failed", "RuntimeError: bad launch")
        return Cost(10.0 if kernel == HIGH_PRECISION else 9.9, "measured")

    only = Options(libraries=("torch",), recipes=("rowwise",))
    chosen = choose_sites.choose_site("a", SHAPE, CPU, only, lambda *_: GOOD, Prices(cost))
    assert all("bad launch" in c.reason and not c.is_fp8 for c in chosen.values())


def test_the_report_says_when_the_host_needs_longer():
    def found(host):
        one = Outcome("torch:tensorwise", 3.0, 5.0, "table", device=1500.0, host=host)
        return Found({("a", "fwd"): one, ("a", "dgrad"): one}, frozenset())

    assert found(1500.0).waits_for_host() is None
    said = found(1600.0).waits_for_host()
    assert (
        said is not None and "3.20 ms" in said and "3.00 ms" in said and "reduce-overhead" in said
    )
