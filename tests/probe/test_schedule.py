"""The schedule of probed steps: early ones, one per window, spread, the same on every rank."""

from __future__ import annotations

from loka_compile.options import PROBE_STEPS
from loka_compile.probe.schedule import Schedule


def steps(schedule: Schedule, until: int) -> list[int]:
    found, at = [], 0
    while (at := schedule.next_after(at)) is not None and at <= until:
        found.append(at)
    return found


def test_early_steps_then_one_per_window() -> None:
    found = steps(Schedule(100), 1008)
    assert found[:PROBE_STEPS] == list(range(1, PROBE_STEPS + 1))
    late = found[PROBE_STEPS:]
    assert [(s - PROBE_STEPS - 1) // 100 for s in late] == list(range(10))
    assert steps(Schedule(100), 1008) == found
    assert steps(Schedule(100, seed=1), 1008) != found


def test_places_in_the_window_are_spread() -> None:
    """A loader that goes round 50 sources is seen through all of them, not through one."""
    late = steps(Schedule(100), 200_000)[PROBE_STEPS:]
    assert len({s % 50 for s in late}) == 50
    mean = sum((s - PROBE_STEPS - 1) % 100 for s in late) / len(late)
    assert 47 < mean < 52


def test_none_after_the_early_ones() -> None:
    assert steps(Schedule(0), 10_000) == list(range(1, PROBE_STEPS + 1))
