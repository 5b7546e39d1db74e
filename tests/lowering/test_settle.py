"""Choosing first and looking after gives what looking at everything gives, for less."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

from loka_compile import _compat
from loka_compile import planner
from loka_compile.lowering import expected
from loka_compile.lowering import measure
from loka_compile.lowering import price_book
from loka_compile.lowering import settle
from loka_compile.lowering import timing_budget
from loka_compile.lowering.choose_sites import find
from loka_compile.lowering.contest import Contest
from loka_compile.lowering.cost_store import CostTable
from loka_compile.lowering.cost_table import CostRow
from loka_compile.lowering.libraries import LIBRARIES
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.measure import Cost
from loka_compile.lowering.parts import MEMORY_BOUND
from loka_compile.lowering.parts import Place
from loka_compile.lowering.parts import guess_us
from loka_compile.lowering.price_book import PriceBook
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION as HIGH
from loka_compile.lowering.settle import Settling
from loka_compile.lowering.site_prices import SitePrices
from loka_compile.lowering.timing_budget import TimingBudget
from loka_compile.options import Options
from loka_compile.probe.quantify import Errors

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16
CHAIN = "block_norm:128:hard_swish"
GOOD = Errors(0.1, 0.05, 0.06, 0.0, 0.0, 28.0, 0.04, non_finite=0, samples=8)
BAD = replace(GOOD, mere_clamped=0.5, mere_clamped_upper=0.6)


@pytest.fixture(autouse=True)
def _real_kernels(monkeypatch):
    """Pretend that this device runs everything, and that all is right at first."""
    for library in LIBRARIES.values():
        monkeypatch.setattr(library, "why_unavailable", lambda device: None, raising=False)
        monkeypatch.setattr(library, "why_no_recipe", lambda recipe, device: None, raising=False)
    monkeypatch.setattr(_compat, "device_key", lambda device: f"made up {device.type}")
    monkeypatch.setattr(measure, "_FAILED", {})
    monkeypatch.setattr(settle.first_use, "check", lambda wanted, device: [None for _ in wanted])


class Prices:
    """Made-up prices: a function of what is asked for, the same whenever it is asked again."""

    def __init__(self, seed: int, fused: bool) -> None:
        self.seed, self.fused = seed, fused

    def _us(self, low: float, high: float, *what: object) -> float:
        return random.Random(f"{self.seed} {what}").uniform(low, high)

    def alone(self, direction, kernel):
        return self.fwd(kernel) if direction == "fwd" else self.back(direction, kernel)

    def fwd(self, kernel, handed=False):
        return Cost(self._us(3, 10, "fwd", kernel, handed), "table")

    def back(self, direction, kernel, *, ready=False, x="plain"):
        return Cost(self._us(3, 10, direction, kernel, ready, x), "table")

    def gradient(self, rules):
        return Cost(self._us(1, 6, "gradient", rules), "table") if self.fused else None

    def bounded(self, turned):
        return Cost(self._us(0, 2, "bounded", turned), "table")

    def saved(self, tensor, rules):
        return Cost(self._us(0, 1, tensor, rules), "")


def _total(found) -> float:
    """What the programme's objective is without a bar for FP8."""
    return math.fsum(outcome.us for outcome in found.outcomes.values())


@pytest.mark.parametrize("seed", range(8))
def test_the_same_optimum_as_when_all_are_looked_at_beforehand(seed, monkeypatch):
    random_ = random.Random(seed)
    names = ["a", "b", "c"]
    fused = {n: random_.random() < 0.6 for n in names}
    producers = {n: p for p, n in itertools.pairwise(names) if fused[p]}
    bounded = {"a": "norm", "c": "norm"} if random_.random() < 0.3 else {}
    producers = {n: p for n, p in producers.items() if n not in bounded}
    prices = {n: Prices(random_.randrange(10**6), fused[n]) for n in names}
    options = Options(min_speedup=1.0)
    share = random_.choice((0.1, 0.4, 0.8))

    def says(what: str, one: str, *key: str) -> bool:
        return random.Random(f"{seed} {what} {one} {key}").random() < share / 2

    asked: list[int] = []

    def check(wanted, device):
        found = [
            "broken" if says("use", str(shape.n), kernel, direction) else None
            for kernel, direction, shape, _ in wanted
        ]
        asked.append(len(found))
        return found

    monkeypatch.setattr(settle.first_use, "check", check)
    measured: list[tuple[str, str, str]] = []

    def settled(eager: bool):
        contests = {}
        for i, n in enumerate(names):
            shape = GemmShape(64, 128, 128 * (i + 1), CHAIN if fused[n] else "")

            def errors(direction, kernel, n=n):
                measured.append((n, direction, kernel))
                return BAD if says("errors", n, direction, kernel) else GOOD

            contests[n] = Contest(n, shape, CPU, options, errors, prices[n], dtype=BF16)
        one = Settling(contests, PriceBook(CostTable(None), "never"), emulate=False)
        one.prepare(scored=False)
        if eager:
            looks = [(c, d, k) for c in contests.values() for d in DIRECTIONS for k in c.names(d)]
            one._try(looks)
            one._measure(looks)
        found, offers = one.settle(
            lambda offers, answers: find(offers, producers, options, prices, None, bounded, answers)
        )
        return found, found.choices(offers, options)

    found, choices = settled(eager=False)
    few, uses = len(measured), sum(asked)
    # All that was chosen was looked at, and holds.
    for (site, direction), outcome in found.outcomes.items():
        if outcome.kernel != HIGH:
            assert not says("errors", site, direction, outcome.kernel)
            assert choices[site][direction].mere == GOOD.mere
            assert choices[site][direction].us == pytest.approx(outcome.us)
    measured.clear()
    asked.clear()
    full, _ = settled(eager=True)
    assert _total(found) == pytest.approx(_total(full), abs=1e-9)
    assert few < len(measured) and uses < sum(asked)


def test_first_uses_of_all_sites_are_asked_for_at_once(monkeypatch):
    asked = []

    def check(wanted, device):
        asked.append(list(wanted))
        return ["broken" if k == "torch:rowwise" else None for k, *_ in wanted]

    monkeypatch.setattr(settle.first_use, "check", check)

    class Cheap(Prices):
        def alone(self, direction, kernel):
            return Cost({HIGH: 9.0, "torch:rowwise": 3.0}.get(kernel, 5.0), "table")

        fwd = lambda self, kernel, handed=False: self.alone("fwd", kernel)  # noqa: E731
        back = lambda self, direction, kernel, **_: self.alone(direction, kernel)  # noqa: E731
        saved = lambda self, *_: Cost(0.0, "")  # noqa: E731

    options = Options(libraries=("torch",), recipes=("rowwise", "tensorwise"))
    shared: dict = {}
    contests = {
        n: Contest(
            n, GemmShape(64, 128, width), CPU, options, lambda *_: GOOD, Cheap(0, False),
            dtype=BF16, tried=shared.setdefault(width, {}),
        )
        for n, width in (("a", 128), ("b", 256), ("c", 128))
    }  # fmt: skip
    prices = {n: c.prices for n, c in contests.items()}
    one = Settling(contests, PriceBook(CostTable(None), "never"), emulate=False)
    one.prepare(scored=False)
    found, _ = one.settle(lambda offers, answers: find(offers, {}, options, prices))
    assert {o.kernel for o in found.outcomes.values()} == {"torch:tensorwise"}
    assert [len(a) for a in asked if a] == [6, 6]
    assert one.spent.counts["first uses"] == 12 and one.spent.counts["rounds"] == 2
    refused = Settling({"a": contests["a"]}, one.book, emulate=True)
    assert not refused._try([(contests["a"], "fwd", "torch:blockwise")])


def test_what_cannot_be_quantified_is_left_out():
    def errors(direction, kernel):
        raise RuntimeError("planted")

    options = Options(libraries=("torch",))
    one = Contest("a", GemmShape(64, 128, 128), CPU, options, errors, None, dtype=BF16)
    prices = Prices(1, False)
    other = Contest("b", GemmShape(64, 128, 128), CPU, options, lambda *_: GOOD, prices, dtype=BF16)
    settling = Settling({"a": one, "b": other}, PriceBook(CostTable(None), "never"), emulate=True)
    settling.prepare(scored=False)
    found, offers = settling.settle(
        lambda offers, answers: find(offers, {}, options, {"b": prices})
    )
    assert settling.broken == {"a": "RuntimeError: planted"}
    assert set(offers) == {"b"} and {site for site, _ in found.outcomes} == {"b"}


# -- timing ---------------------------------------------------------------------------------------

SHAPES = [(m, k, n) for m in (512, 4096) for k in (256, 1024) for n in (384, 512, 2048)]
HERE = [GemmShape(2048, 512, 1024), GemmShape(8192, 2048, 256), GemmShape(1024, 1024, 4096)]


def _truth(key) -> float:
    """Smooth in the shape, so that a fit is right, and different for every kernel."""
    if key.direction in MEMORY_BOUND:
        return guess_us(key, 2)
    speed = (
        1.0 if key.kernel == HIGH else random.Random(f"{key.kernel} {key.direction}").uniform(1, 3)
    )
    return 2.0 + key.m * key.k * key.n / (speed * 2e8)


@pytest.fixture
def timed(monkeypatch):
    """Truth, off by up to 7 % from shape to shape; what was timed."""
    found = []

    def time_us(key, dtype, device, many=False):
        found.append(key)
        return _truth(key) * random.Random(f"{key}").uniform(0.93, 1.07)

    monkeypatch.setattr(measure, "time_us", time_us)
    return found


def _rows(shapes) -> list[CostRow]:
    rows = []
    for m, k, n in shapes:
        place = Place(GemmShape(m, k, n), BF16, CUDA)
        for name in [HIGH, *(f"{x.name}:{r}" for x in LIBRARIES.values() for r in x.recipes)]:
            for direction in DIRECTIONS:
                key = place.gemm(direction, name)
                rows.append(CostRow(key, _truth(key), "2026-01-01"))
    return rows


def _settled(table: CostTable, shapes=HERE, budget=None):
    options = Options(min_speedup=1.0)
    book = PriceBook(table, "auto", budget)
    contests, prices = {}, {}
    for shape in shapes:
        name = str(shape)
        prices[name] = SitePrices(Place(shape, BF16, CUDA), tune="auto", table=table, book=book)
        contests[name] = Contest(
            name, shape, CUDA, options, lambda *_: GOOD, prices[name], dtype=BF16
        )
    one = Settling(contests, book, emulate=False)
    one.prepare(scored=False)
    found, _ = one.settle(
        lambda offers, answers: find(offers, {}, options, prices, None, None, answers)
    )
    return found, one


def _cost(found) -> float:
    """What the choice takes by the clock, parts that move memory among it."""
    total = 0.0
    for (name, direction), outcome in found.outcomes.items():
        shape = next(s for s in HERE if str(s) == name)
        key = Place(shape, BF16, CUDA).gemm(direction, outcome.kernel)
        total += measure.time_us(key, BF16, CUDA)
    return total


def test_few_are_timed_and_the_best_of_all_is_found(timed, monkeypatch):
    few, settling = _settled(CostTable(None, _rows(SHAPES)))
    count = len(timed)
    assert settling.spent.counts["timing"] == count
    # The same with every kernel timed: one that has not been counts for next to nothing.
    monkeypatch.setattr(expected, "SLACK", 1e6)
    timed.clear()
    every, _ = _settled(CostTable(None, _rows(SHAPES)))
    assert count < len(timed) / 2
    assert _total(few) == pytest.approx(_total(every), rel=1e-6)
    assert _cost(few) <= _cost(every) * 1.000001


@pytest.mark.parametrize("rows", [SHAPES, []], ids=["known", "unknown"])
def test_prices_that_are_kept_are_those_that_hold(rows, timed, monkeypatch):
    """After every round, for a chain whose reader's prices hold what its producer pays, too."""
    real, checked = Settling._offers, []
    table, options = CostTable(None, _rows(rows)), Options(min_speedup=1.0)
    book = PriceBook(table, "auto")

    def made():
        own = [Place(replace(s, epilogue=CHAIN), BF16, CUDA, "nk", CHAIN) for s in HERE]
        first = SitePrices(own[0], tune="auto", table=table, book=book)
        second = SitePrices(own[2], tune="auto", table=table, book=book, producer=first)
        return {"a": first, "b": second}

    def offers(self, budget):
        found = real(self, budget)
        fresh = made()
        for name, one in self.contests.items():
            for d, k in itertools.product(DIRECTIONS, [HIGH, *one.names("fwd")]):
                assert one.prices.alone(d, k) == fresh[name].alone(d, k)
                assert one.prices.fwd(k, True) == fresh[name].fwd(k, True)
                checked.append(book.version)
        return found

    monkeypatch.setattr(Settling, "_offers", offers)
    prices = made()
    contests = {
        n: Contest(n, p.place.shape, CUDA, options, lambda *_: GOOD, p, dtype=BF16)
        for n, p in prices.items()
    }
    one = Settling(contests, book, emulate=False)
    one.prepare(scored=False)
    one.settle(lambda offers, answers: find(offers, {"b": "a"}, options, prices, answers=answers))
    assert len(set(checked)) > 1 and timed


def test_an_unknown_device_is_learned_in_few_rows(timed):
    shapes = [GemmShape(*shape) for shape in SHAPES]
    found, settling = _settled(CostTable(None), shapes)
    keys = {
        settling.contests[str(s)].prices.to_time(d, k).key
        for s in shapes
        for d in DIRECTIONS
        for k in [HIGH, *settling.contests[str(s)].names(d)]
    }
    assert len(timed) == len(set(timed)) < len(keys) / 2
    assert {key.direction for key in timed} == set(DIRECTIONS)
    assert all(o.kernel == HIGH or o.best_us == o.us for o in found.outcomes.values())
    assert any(o.kernel != HIGH for o in found.outcomes.values())


def test_timing_has_its_time(timed, monkeypatch):
    monkeypatch.setattr(timing_budget, "SECONDS", 0.0)
    found, settling = _settled(CostTable(None, _rows(SHAPES)))
    assert not timed and not settling.book.open
    assert any(o.kernel != HIGH for o in found.outcomes.values())
    # And of what nothing is known, nothing is chosen.
    monkeypatch.setattr(timing_budget, "MOST_SECONDS", 0.0)
    found, settling = _settled(CostTable(None))
    assert not timed and not found.joint


@pytest.fixture
def clock(timed, monkeypatch):
    """A clock that stands still but for 0.4 s per kernel that is timed."""
    real, now = measure.time_us, [100.0]

    def time_us(*arguments):
        now[0] += 0.4
        return real(*arguments)

    monkeypatch.setattr(measure, "time_us", time_us)
    monkeypatch.setattr(price_book.time, "monotonic", lambda: now[0])
    return now


def test_graphs_of_one_model_share_the_time_for_timing(timed, clock, monkeypatch):
    monkeypatch.setattr(timing_budget, "_CURRENT", TimingBudget())
    first, second = timing_budget.budget_of_capture(), timing_budget.budget_of_capture()
    assert first is second
    alone = [GemmShape(m, 768, 1536) for m in (512, 1024, 2048, 4096, 8192)]
    _, one = _settled(CostTable(None, _rows(SHAPES)), budget=first)
    count = len(timed)
    assert first.seconds == pytest.approx(0.4 * count)
    clock[0] += 3600.0  # What compiling took in between is not timing.
    found, other = _settled(CostTable(None, _rows(SHAPES)), alone, budget=second)
    # The last kernel begins within the limit.
    assert timing_budget.SECONDS <= second.seconds < timing_budget.SECONDS + 0.4
    assert 0 < len(timed) - count < len(found.joint)
    assert other.untimed and not one.untimed and not other.unknown()
    said = planner.untimed(other)
    assert said is not None and f"{len(other.untimed)} chosen kernels count as expected" in said
    # What is captured after a plan is another model's.
    assert timing_budget.budget_of_capture() is not first


def test_what_nobody_knows_is_reported_once_the_time_is_up(timed, clock):
    budget = TimingBudget()
    budget.seconds = timing_budget.MOST_SECONDS - 1.0
    found, settling = _settled(CostTable(None), budget=budget)
    assert len(timed) == 3 and not found.joint
    unknown = len(settling.unknown())
    assert unknown > 10
    assert f"{unknown} could not be chosen" in str(planner.untimed(settling))


def test_a_kernel_that_fails_when_timed_is_not_chosen(timed, monkeypatch):
    before, _ = _settled(CostTable(None, _rows(SHAPES)))
    victim = next(o.kernel for o in before.outcomes.values() if o.kernel != HIGH)
    real = measure.time_us

    def time_us(key, *rest):
        if key.kernel == victim:
            raise RuntimeError("bad launch")
        return real(key, *rest)

    monkeypatch.setattr(measure, "time_us", time_us)
    after, _ = _settled(CostTable(None, _rows(SHAPES)))
    assert victim not in {o.kernel for o in after.outcomes.values()}
