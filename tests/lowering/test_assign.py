"""The integer programme equals brute force, with hand-overs and a budget."""

from __future__ import annotations

import itertools
import random

import pytest

from loka_compile.lowering.assign import Clash
from loka_compile.lowering.assign import InfeasibleError
from loka_compile.lowering.assign import Option
from loka_compile.lowering.assign import Shared
from loka_compile.lowering.assign import solve
from loka_compile.lowering.assign import total_us


def _fits(slots, chosen, budget, clashes=()) -> bool:
    taken = [s[i] for s, i in zip(slots, chosen, strict=True)]
    if budget is not None and sum(o.score for o in taken) > budget:
        return False
    return all(chosen[slot] in some for o in taken for slot, some in o.needs) and not any(
        all(chosen[slot] in some for slot, some in clash.parts) for clash in clashes
    )


def _brute(slots, budget, shared=(), clashes=()) -> float:
    every = itertools.product(*(range(len(s)) for s in slots))
    return min(total_us(slots, c, shared) for c in every if _fits(slots, c, budget, clashes))


def _chain(random_: random.Random, length: int):
    """High precision (option 0), kernels, and a cheaper form of each that needs the producer's."""
    slots = []
    for position in range(length):
        options = [Option(10 * random_.random() + 5)]
        for _ in range(random_.randint(1, 2)):
            us = 12 * random_.random() + 1
            options.append(Option(us, random_.random()))
            if position:
                of_producer = range(1, len(slots[-1]))
                some = frozenset(i for i in of_producer if random_.random() < 0.6)
                options.append(Option(us * 0.7, options[-1].score, ((position - 1, some),)))
        slots.append(options)
    return slots


@pytest.mark.parametrize("seed", range(30))
def test_equals_brute_force(seed):
    random_ = random.Random(seed)
    slots = _chain(random_, random_.randint(2, 5))
    budget = [None, 0.0, 0.5, 1.5][seed % 4]
    chosen = solve(slots, budget)
    assert _fits(slots, chosen, budget)
    assert total_us(slots, chosen) == pytest.approx(_brute(slots, budget), rel=1e-6)


def _some(random_: random.Random, slots, at: int):
    return at, frozenset(i for i in range(len(slots[at])) if random_.random() < 0.5)


@pytest.mark.parametrize("seed", range(40))
def test_shared_costs_and_clashes_equal_brute_force(seed):
    random_ = random.Random(1000 + seed)
    slots = _chain(random_, random_.randint(2, 5))
    last = len(slots) - 1
    shared, clashes = [], []
    for _ in range(random_.randint(1, 4)):
        a, b = random_.randint(0, last), random_.randint(0, last)
        users = tuple(_some(random_, slots, at) for at in {a, b})
        shared.append(Shared(6 * random_.random(), users))
        parts = tuple((at, some - {0}) for at, some in users)
        clashes.append(Clash(parts))
    budget = [None, 1.0][seed % 2]
    chosen = solve(slots, budget, shared, clashes)
    assert _fits(slots, chosen, budget, clashes)
    want = _brute(slots, budget, shared, clashes)
    assert total_us(slots, chosen, shared) == pytest.approx(want, rel=1e-6)


def test_what_is_shared_is_paid_once():
    """One read of 6 us for two kernels: either alone does not pay, both do."""
    slots = [[Option(10.0), Option(5.0)], [Option(10.0), Option(5.0)]]
    both = Shared(6.0, ((0, frozenset({1})), (1, frozenset({1}))))
    assert solve(slots, shared=[both]) == [1, 1]
    dear = Shared(10.5, both.users)
    assert solve(slots, shared=[dear]) == [0, 0]
    assert solve(slots, shared=[both], clashes=[Clash(both.users)]) == [0, 0]


def test_many_kernels_alike_are_one_kind():
    """Options that couple alike leave the programme but for the cheapest; ties take the first."""
    own = [Option(4.0), *(Option(9.0 - 0.125 * i) for i in range(32)), Option(5.125)]
    follows = [Option(10.0), Option(2.0, needs=((0, frozenset(range(1, 34))),))]
    assert solve([own, follows]) == [32, 1]
    assert solve([own, [Option(3.0)]]) == [0, 0]


def test_a_producer_gives_way_for_its_consumers_gain():
    """The producer's slower kernel hands over, which pays at the consumer."""
    producer = [Option(10.0), Option(8.0), Option(8.5)]
    consumer = [Option(10.0), Option(8.0), Option(5.0, needs=((0, frozenset({2})),))]
    assert solve([producer, consumer]) == [2, 2]
    consumer[2] = Option(7.8, needs=((0, frozenset({2})),))
    assert solve([producer, consumer]) == [1, 1]


def test_a_budget_is_a_promise():
    slots = [[Option(10.0), Option(1.0, 6e-5)], [Option(10.0), Option(2.0, 5e-5)]]
    assert solve(slots, 1e-4) == [1, 0]
    assert solve(slots, 1.2e-4) == [1, 1]
    assert solve(slots, 0.0) == [0, 0]
    assert solve([[Option(10.0), Option(1.0, 1e-9)]], 0.0) == [0]


def test_many_sites_are_quick_enough():
    """300 linears x 3 directions: what a plan of a large model asks for."""
    random_ = random.Random(0)
    slots = _chain(random_, 900)
    chosen = solve(slots)
    assert _fits(slots, chosen, None)


def test_what_cannot_be_solved_says_so():
    with pytest.raises(InfeasibleError):
        solve([[Option(1.0, 2.0)]], 1.0)
    with pytest.raises(InfeasibleError, match="without options"):
        solve([[]])
