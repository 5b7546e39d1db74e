"""What a session keeps between probes: names found once, and the few numbers that are new."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import torch

from loka_compile.probe import watched as wd
from loka_compile.probe.statistics import AMAX
from loka_compile.probe.statistics import SCALARS
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.statistics import update
from loka_compile.probe.weights import Record

CPU = torch.device("cpu")


def state() -> Statistics:
    return Statistics.empty(3, torch.float32, CPU)


def entry(name: str, *held: Statistics) -> Any:
    sites: dict[int, Any] = dict.fromkeys(range(len(held)))
    statistics = {(call, "x"): one for call, one in enumerate(held)}
    return SimpleNamespace(name=name, sites=sites, statistics=statistics)


def test_names_are_those_of_the_entries_and_keep_nothing_alive() -> None:
    weight = torch.zeros(2, 2)
    kept = wd.Watched(Record([weight]), ["a"], weakref.ref(weight))
    one, two, foreign = state(), state(), state()
    entries = [entry("a", one), entry("b", two)]
    everything = kept.named(entries, None)
    assert [name for _, name in everything] == [("a", "x"), ("b", "x")]
    assert everything[0][0] is one and everything[1][0] is two
    assert [name for _, name in kept.named(entries, [two])] == [("b", "x")]
    assert kept.named(entries, [foreign]) == []
    # The site has state of its own now.
    new = state()
    entries[0].statistics[0, "x"] = new
    ((found, name),) = kept.named(entries, [new])
    assert found is new and name == ("a", "x")
    gone = weakref.ref(two)
    del entries, two, everything, found
    gc.collect()
    assert gone() is None


def test_only_what_is_new_is_read(device) -> None:
    one, two = (Statistics.empty(3, torch.float32, device) for _ in range(2))
    fed: dict[tuple[int, str, str], float] = {}

    def read(error: float | None = None) -> list[tuple[str, str, float]]:
        numbers = [one.scalars, two.scalars]
        if error is not None:
            numbers.append(torch.tensor([error], dtype=torch.float64, device=device))
        erring = None if error is None else "a"
        looked = wd.Looked.at([("a", "x"), ("b", "g")], erring, torch.cat(numbers), 7)
        assert looked.numbers.numel() in (2 * SCALARS, 2 * SCALARS + 1)
        return list(looked.read(fed, 1))

    assert read() == []
    update(torch.full((4, 3), 2.0, device=device), one)
    assert read() == [("a", "input maximum", 2.0), ("a", "input RMS", 2.0)]
    assert read(0.25) == [("a", wd.ERROR, 0.25)]
    for value in (3.0, 5.0):
        update(torch.full((4, 3), value, device=device), two)
    # The newest batch's, not the largest so far.
    update(torch.full((4, 3), 1.0, device=device), two)
    assert read(0.5) == [
        ("b", "gradient maximum", 1.0),
        ("b", "gradient RMS", 1.0),
        ("a", wd.ERROR, 0.5),
    ]
    assert float(two.scalars[AMAX]) == 5
