"""The choice of least max(device, host), against an exhaustive search."""

from __future__ import annotations

import itertools
import random

import pytest

from loka_compile.lowering.balance import balanced

#: Per slot: (device, host) of each option.
Slots = list[list[tuple[float, float]]]


def slots_of(seed: int, count: int) -> Slots:
    """High precision first; FP8 takes the device less and the host more, as a rule."""
    draw = random.Random(seed).uniform
    made = []
    for _ in range(count):
        high, start = draw(20, 100), draw(15, 30)
        made.append([(high, start), *((high * draw(0.4, 1.1), start * draw(1, 4)) for _ in "ab")])
    return made


def totals(slots: Slots, choice) -> tuple[float, float]:
    return tuple(sum(slots[i][c][of] for i, c in enumerate(choice)) for of in (0, 1))


def solve(slots: Slots, share: float):
    def worth(option):
        return share * option[0] + (1 - share) * option[1]

    return tuple(min(range(len(own)), key=lambda i: worth(own[i])) for own in slots)


def between(one, other):
    for i in range(len(one)):
        yield (*other[: i + 1], *one[i + 1 :])


def found(slots: Slots):
    asked = []

    def solver(share):
        asked.append(share)
        return solve(slots, share)

    choice = balanced(solver, lambda c: totals(slots, c), between)
    return max(totals(slots, choice)), asked


@pytest.mark.parametrize("seed", range(40))
def test_within_one_kernel_of_the_best_of_all(seed: int):
    slots = slots_of(seed, 8)
    best = min(
        max(totals(slots, c)) for c in itertools.product(*(range(len(own)) for own in slots))
    )
    got, asked = found(slots)
    largest = max(abs(a - b) for own in slots for (a, _), (b, _) in itertools.combinations(own, 2))
    assert best <= got <= best + largest
    # Never worse than what looks at the device alone, or at the host.
    assert got <= max(totals(slots, solve(slots, 1.0)))
    assert len(asked) <= 7


def test_one_question_where_the_device_is_what_a_step_waits_for():
    slots = [[(100.0, 20.0), (50.0, 45.0)]] * 4
    assert found(slots) == (200.0, [1.0])


def test_a_slow_host_takes_fp8_where_it_gains_most():
    # All in high precision: 800 of the device. All in FP8: 300 of it, and 400 of the host.
    slots = [[(100.0, 20.0), (50.0, 140.0)]] * 2 + [[(300.0, 20.0), (100.0, 60.0)]] * 2
    got, _ = found(slots)
    # FP8 where 40 us of the host save 200 of the device; of those where 120 save 50, in one.
    assert got == 2 * 100.0 + 100.0 + 50.0


def test_a_host_that_needs_longer_whatever_is_chosen():
    slots = [[(10.0, 20.0), (5.0, 60.0), (8.0, 20.0)]] * 3
    got, _ = found(slots)
    assert got == 60.0
    choice = balanced(lambda share: solve(slots, share), lambda c: totals(slots, c))
    # The host needs as long for two of them: the device decides.
    assert choice == (2, 2, 2)


def test_equal_slots_are_told_apart():
    slots = [[(100.0, 20.0), (40.0, 90.0)]] * 16
    got, _ = found(slots)
    assert got == 10 * 90.0 + 6 * 20.0
