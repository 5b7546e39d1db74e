"""The programme over sites equals an exhaustive search over what the runtime would really do."""

from __future__ import annotations

import itertools
import random

import pytest

from loka_compile.lowering import chain
from loka_compile.lowering.entries import Kernel
from loka_compile.lowering.entries import hands_over
from loka_compile.lowering.entries import operand_of
from loka_compile.lowering.entries import takes_e4m3
from loka_compile.lowering.measure import Cost
from loka_compile.lowering.parts import HANDED
from loka_compile.lowering.parts import PLAIN
from loka_compile.lowering.parts import WIDENED
from loka_compile.lowering.programme import Programme
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION as HIGH

BACK = [HIGH, "torch:tensorwise", "torch:rowwise", "torch:blockwise"]
FUSED = {"fwd": [*BACK, "loka:tensorwise", "loka:rowwise"], "dgrad": BACK, "wgrad": BACK}
BARE = dict.fromkeys(DIRECTIONS, BACK)


class Prices:
    """Made-up prices: a function of what is asked for, the same whenever it is asked again."""

    def __init__(self, seed: int, fused: bool, shares: bool = True) -> None:
        self.seed, self.fused, self.shares = seed, fused, shares

    def _us(self, low: float, high: float, *what: object) -> float:
        return random.Random(f"{self.seed} {what}").uniform(low, high)

    def fwd(self, kernel, handed=False):
        return Cost(self._us(3, 10, "fwd", kernel, handed), "table")

    def back(self, direction, kernel, *, ready=False, x=PLAIN):
        return Cost(self._us(3, 10, direction, kernel, ready, x), "table")

    def gradient(self, rules):
        return Cost(self._us(1, 6, "gradient", rules), "table") if self.fused else None

    def bounded(self, turned):
        return None

    def saved(self, tensor, rules):
        return Cost(self._us(0, 1, tensor, rules) if self.shares else 0.0, "")


def runs(prices: Prices, kernels, handed: bool) -> float:
    """What one step of a site costs with these kernels, by the rules of `ops` and `handover`."""
    fwd, dgrad, wgrad = kernels
    handed = handed and takes_e4m3(fwd, "fwd")
    x = PLAIN
    if handed:
        x = HANDED if takes_e4m3(wgrad, "wgrad") else WIDENED
    rules = chain.backward_rules(*kernels) if prices.fused else None
    ready = rules is not None
    total = prices.fwd(fwd, handed).us
    total += prices.back("dgrad", dgrad, ready=ready).us
    total += prices.back("wgrad", wgrad, ready=ready, x=x).us
    if prices.fused:
        total += prices.gradient(rules).us
    for tensor, one, other, comes in (
        ("x", ("fwd", fwd), ("wgrad", wgrad), handed),
        ("w", ("fwd", fwd), ("dgrad", dgrad), False),
        ("gy", ("dgrad", dgrad), ("wgrad", wgrad), ready),
    ):
        both = (operand_of(one[0], tensor, one[1]), operand_of(other[0], tensor, other[1]))
        if None not in both and not comes:
            total -= prices.saved(tensor, both).us
    return total


def chain_runs(sites, kernels) -> float:
    total, before = 0.0, HIGH
    for prices, own in zip(sites, kernels, strict=True):
        total += runs(prices, own, hands_over(before))
        before = own[0]
    return total


def exhaustive(sites) -> float:
    """The least over every combination of kernels, by dynamic programming over the hand-overs."""
    best = {False: 0.0}
    for prices in sites:
        found: dict[bool, float] = {}
        per = FUSED if prices.fused else BARE
        for own in itertools.product(*(per[d] for d in DIRECTIONS)):
            for handed, us in best.items():
                total = us + runs(prices, own, handed)
                key = hands_over(own[0])
                found[key] = min(found.get(key, total), total)
        best = found
    return min(best.values())


def solved(sites, factor: float = 1.0):
    programme = Programme(factor)
    for i, prices in enumerate(sites):
        per = FUSED if prices.fused else BARE
        kernels = {d: [Kernel(k) for k in per[d]] for d in DIRECTIONS}
        programme.add(str(i), kernels, prices, str(i - 1) if i else None)
    return programme.solve()


def taken(outcomes, sites):
    return [tuple(outcomes[str(i), d].kernel for d in DIRECTIONS) for i in range(len(sites))]


@pytest.mark.parametrize("seed", range(24))
def test_equals_an_exhaustive_search(seed):
    length = 1 + seed % 3
    sites = [Prices(10 * seed + i, fused=i < length - 1 or seed % 2 == 0) for i in range(length)]
    outcomes = solved(sites)
    real = chain_runs(sites, taken(outcomes, sites))
    assert real == pytest.approx(exhaustive(sites), rel=1e-6)
    # What is reported adds up to what runs.
    assert sum(o.us for o in outcomes.values()) == pytest.approx(real, rel=1e-6)


class Measured(Prices):
    """One fused site of 4096 x 2048 x 2048, about as an H200 prices it."""

    def __init__(self, own_gradient: float = 30.0) -> None:
        super().__init__(0, fused=True, shares=False)
        self.own_gradient = own_gradient

    def fwd(self, kernel, handed=False):
        return Cost({HIGH: 65.0, "loka:tensorwise": 48.0}.get(kernel, 70.0), "table")

    def back(self, direction, kernel, *, ready=False, x=PLAIN):
        if kernel == HIGH:
            return Cost(55.0, "table")
        bare = {"torch:tensorwise": 40.0, "torch:rowwise": 44.0}.get(kernel, 50.0)
        return Cost(bare if ready else bare + 26.0, "table")

    def gradient(self, rules):
        return Cost(25.0 if rules is None else self.own_gradient, "table")


def test_a_shared_backward_kernel_is_paid_once():
    """Each direction alone would have to earn the 30 us kernel, and does not; both do."""
    (chosen,) = taken(solved([Measured()], 1.05), [0])
    assert chosen == ("loka:tensorwise", "torch:tensorwise", "torch:tensorwise")
    outcomes = solved([Measured()], 1.05)
    us = [outcomes["0", d].us for d in DIRECTIONS]
    assert us == [48.0, 55.0, 55.0]
    assert [outcomes["0", d].high_us for d in DIRECTIONS] == [65.0, 67.5, 67.5]
    # Dearer than what both gain: the forward alone stays FP8, its gradient is made in steps.
    (chosen,) = taken(solved([Measured(60.0)], 1.05), [0])
    assert chosen == ("loka:tensorwise", HIGH, HIGH)


def test_the_bar_is_for_what_directions_gain_together():
    """A joint gain of 3 % does not clear 1.05."""
    # Backward: 80 + 51 us against 110 + 25.
    assert taken(solved([Measured(51.0)], 1.0), [0])[0][1] != HIGH
    assert taken(solved([Measured(51.0)], 1.05), [0])[0][1] == HIGH


def test_our_kernel_runs_wherever_it_can():
    """A dear kernel of ours cannot be wished away: the forward that brings it gives way."""

    class Dear(Measured):
        def back(self, direction, kernel, *, ready=False, x=PLAIN):
            return Cost(20.0 if kernel != HIGH else 200.0, "table")

    prices = Dear(500.0)
    (chosen,) = taken(solved([prices]), [0])
    assert chain.backward_rules(*chosen) is None and chosen[1] != HIGH and chosen[2] != HIGH
    assert chain_runs([prices], [chosen]) == pytest.approx(exhaustive([prices]))


def test_what_cannot_be_priced_is_left_out():
    class Some(Measured):
        def back(self, direction, kernel, *, ready=False, x=PLAIN):
            if kernel == "torch:tensorwise":
                return Cost(None, "failed", "RuntimeError")
            return super().back(direction, kernel, ready=ready, x=x)

    (chosen,) = taken(solved([Some()]), [0])
    assert chosen == ("loka:tensorwise", "torch:rowwise", "torch:rowwise")


def test_a_forced_direction_without_a_price_still_couples():
    programme = Programme()
    kernels = {d: [Kernel(k) for k in FUSED[d]] for d in DIRECTIONS}
    kernels["fwd"] = [Kernel("loka:tensorwise")]

    class Forced(Measured):
        def fwd(self, kernel, handed=False):
            return None

    programme.add("0", kernels, Forced())
    assert [programme.solve()["0", d].kernel for d in DIRECTIONS[1:]] == ["torch:tensorwise"] * 2


def test_a_large_model_is_quick():
    """20 chains of three fused layers and a bare one, all different."""
    programme = Programme(1.05)
    for chain_number in range(20):
        for i in range(4):
            prices = Prices(chain_number, fused=i < 3)
            per = FUSED if i < 3 else BARE
            kernels = {d: [Kernel(k) for k in per[d]] for d in DIRECTIONS}
            name = f"{chain_number}.{i}"
            programme.add(name, kernels, prices, f"{chain_number}.{i - 1}" if i else None)
    assert len(programme.solve()) == 20 * 4 * 3


class Bounded(Prices):
    """Reads the result of a norm on its own, which costs `written` as e4m3, once."""

    def __init__(self, seed: int, written: float) -> None:
        super().__init__(seed, fused=False)
        self.written = written

    def bounded(self, turned):
        return Cost(self.written if turned else self.written / 2, "table")


def bounded_runs(sites, kernels, trains: bool) -> float:
    """By the rules of `handover`: it is no choice."""
    total, taken_by = 0.0, 0
    for prices, own in zip(sites, kernels, strict=True):
        fwd, _, wgrad = own
        handed = takes_e4m3(fwd, "fwd") and (not trains or takes_e4m3(wgrad, "wgrad"))
        taken_by += handed
        if trains:
            total += runs(prices, own, handed)
        else:
            total += prices.fwd(fwd, handed).us
    return total + (sites[0].bounded(trains).us if taken_by else 0.0)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_a_norms_readers_equal_an_exhaustive_search(seed: int, trains: bool) -> None:
    sites = [Bounded(100 * seed + i, written=float(seed)) for i in range(2)]
    some = [HIGH, "torch:tensorwise", "torch:rowwise", "torch:blockwise"]
    back = some if trains else [HIGH]
    per = {"fwd": some, "dgrad": back, "wgrad": back}
    programme = Programme()
    for i, prices in enumerate(sites):
        kernels = {d: [Kernel(k) for k in per[d]] for d in DIRECTIONS}
        programme.add(str(i), kernels, prices, bounded="y", trains=trains)
    outcomes = programme.solve()
    every = list(itertools.product(*(per[d] for d in DIRECTIONS)))
    least = min(bounded_runs(sites, two, trains) for two in itertools.product(every, every))
    chosen = taken(outcomes, sites)
    assert bounded_runs(sites, chosen, trains) == pytest.approx(least, rel=1e-6)
    reported = sum(o.us for (_, d), o in outcomes.items() if trains or d == "fwd")
    assert reported == pytest.approx(least, rel=1e-6)


def test_writing_for_two_readers_pays_where_for_one_it_does_not() -> None:
    class One(Bounded):
        def fwd(self, kernel, handed=False):
            return Cost(10.0 if kernel == HIGH else (6.0 if handed else 12.0), "table")

        def saved(self, tensor, rules):
            return Cost(0.0, "")

    def chosen(count: int) -> set[str]:
        programme = Programme()
        kernels = {d: [Kernel(HIGH)] for d in DIRECTIONS}
        kernels["fwd"] += [Kernel("torch:tensorwise")]
        for i in range(count):
            programme.add(str(i), kernels, One(0, 10.0), bounded="y", trains=False)
        return {programme.solve()[str(i), "fwd"].kernel for i in range(count)}

    # 5 us to write, 4 us saved per reader.
    assert chosen(1) == {HIGH}
    assert chosen(2) == {"torch:tensorwise"}
