"""Choices over all sites: prices per direction, hand-overs along a chain."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loka_compile.lowering import choose_sites
from loka_compile.lowering.balance import StepTimes
from loka_compile.lowering.choose import Candidate
from loka_compile.lowering.choose import Offers
from loka_compile.lowering.choose_sites import Found
from loka_compile.lowering.entries import Outcome
from loka_compile.lowering.libraries import LIBRARIES
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.measure import Cost
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.options import Options
from loka_compile.plan import Choice
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
        one = Outcome("torch:tensorwise", 1500.0, 1600.0, "table", host=host)
        return Found({("a", "fwd"): one, ("a", "dgrad"): one}, frozenset())

    assert found(1500.0).waits_for_host() is None
    said = found(1600.0).waits_for_host()
    assert (
        said is not None and "3.20 ms" in said and "3.00 ms" in said and "reduce-overhead" in said
    )


def cost_of_both(direction: str, kernel: str, handed: bool) -> Cost:
    """A forward: 100 us of the device and 20 of the host; in FP8 40, and 90."""
    if direction != "fwd":
        return Cost(0.0, "table")
    high = kernel == HIGH_PRECISION
    return Cost(100.0 if high else 40.0, "table", host=20.0 if high else 90.0)


KERNEL = "torch:tensorwise"
ONE = {
    "fwd": Offers(100.0, ((Candidate(KERNEL, GOOD, 40.0, "table"), 2.5),)),
    "dgrad": Offers(fixed=Choice()),
    "wgrad": Offers(fixed=Choice()),
}


def test_equal_sites_do_not_all_change_their_minds_at_once():
    names = [str(i) for i in range(16)]
    prices = dict.fromkeys(names, Prices(cost_of_both))
    found = choose_sites.find(dict.fromkeys(names, ONE), {}, REAL, prices)
    taken = [found.outcomes[name, "fwd"] for name in names]
    assert sum(one.kernel == KERNEL for one in taken) == 10
    # 10 x 40 + 6 x 100 us of the device; 10 x 90 + 6 x 20 of the host.
    assert sum(one.us for one in taken) == 1000.0 and sum(one.host for one in taken) == 1020.0
    said = found.waits_for_host()
    assert said is not None and "1.02 ms" in said and "1.00 ms" in said
    choices = found.choices(dict.fromkeys(names, ONE), REAL)
    for name in names:
        # What a clock would show, whatever decided.
        choice = choices[name]["fwd"]
        assert choice.us == 40.0 and choice.speedup == 2.5
        assert choice.is_fp8 or "costs the host more" in choice.reason


def test_what_stays_in_high_precision_counts_as_well():
    """A step that waits for the device because of others has time to start FP8."""
    refused = {d: Offers(900.0, refused=((Candidate(KERNEL, BAD, 9.0), "no"),)) for d in DIRECTIONS}
    offers = {"big": refused, **{str(i): ONE for i in range(16)}}
    prices = {name: Prices(cost_of_both) for name in offers}
    prices["big"] = Prices(lambda *_: Cost(900.0, "table", host=20.0))
    found = choose_sites.find(offers, {}, REAL, prices)
    assert all(found.outcomes[str(i), "fwd"].kernel == KERNEL for i in range(16))
    assert found.rest == (2700.0, 60.0) and found.waits_for_host() is None


@pytest.mark.parametrize(
    ("step", "kernel"),
    [
        (None, KERNEL),
        # The host is busy for longer with what is no linear, too.
        (StepTimes(device=1000.0, host=3000.0), HIGH_PRECISION),
        (StepTimes(device=1000.0, host=1100.0), KERNEL),
        (StepTimes(device=3000.0, host=1000.0), KERNEL),
    ],
)
def test_what_all_of_a_step_takes_decides_whether_the_host_counts(step, kernel):
    found = choose_sites.find({"a": ONE}, {}, REAL, {"a": Prices(slower_on_the_host)}, step=step)
    assert found.choices({"a": ONE}, REAL)["a"]["fwd"].kernel == kernel
    said = found.waits_for_host()
    assert (said is not None) == (kernel == HIGH_PRECISION)
    assert said is None or "all of this graph" in said


def slower_on_the_host(direction: str, kernel: str, handed: bool) -> Cost:
    """A forward that FP8 makes faster, though for the host it is more: still less than the device
    takes."""
    return replace(
        cost_of_both(direction, kernel, handed), host=5.0 if kernel == HIGH_PRECISION else 30.0
    )
