"""Sites take turns at late probes; all are looked at early, and as often as each other later."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loka_compile import loka_backend
from loka_compile.ledger import LEDGER
from loka_compile.options import PROBE_STEPS
from loka_compile.passes.observe import StateKey
from loka_compile.probe.forwards import Forward
from loka_compile.probe.places import Places
from loka_compile.probe.schedule import Schedule
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.turns import SITES
from loka_compile.probe.turns import Turns
from loka_compile.probing import Late

CPU = torch.device("cpu")


def turns_of(count: int) -> tuple[Turns, Places, list[StateKey]]:
    keys = [StateKey(f"site{i}", role) for i in range(count) for role in "xg"]
    held = [Statistics.empty(4, torch.float32, CPU, gradient=k.role == "g") for k in keys]
    places = Places(held, CPU)
    return Turns(keys, places), places, keys


@pytest.mark.parametrize("count", [1, SITES, SITES + 1, 3 * SITES + 2])
def test_every_site_is_asked_once_a_round(count) -> None:
    own, places, keys = turns_of(count)
    rounds = -(-count // SITES)
    assert len(own.parts) == rounds
    # Without turns all are asked.
    assert not any(place.rests for place in places.groups)
    for _ in range(2):
        asked: list[str] = []
        for _ in range(rounds):
            own.take()
            both = [{p.rests for p, k in zip(places.groups, keys, strict=True) if k.site == n}
                    for n in dict.fromkeys(k.site for k in keys)]  # fmt: skip
            # A site's input and its gradient are looked at in the same steps.
            assert all(len(one) == 1 for one in both)
            now = [f"site{i}" for i, one in enumerate(both) if one == {False}]
            assert 0 < len(now) <= SITES
            asked += now
        assert sorted(asked) == sorted({k.site for k in keys})


def test_what_may_have_changed_are_this_turn_and_the_one_before() -> None:
    own, places, _ = turns_of(3 * SITES)
    before: set[int] = set()
    for number in range(7):
        own.take()
        now = {id(place.held) for place in places.groups if not place.rests}
        news = own.news()
        # The early probes asked all.
        assert (news is None) == (number == 0)
        if news is not None:
            assert {id(one) for one in news} == now | before and len(news) == 4 * SITES
        before = now


def test_turns_of_one_graph_leave_those_of_another() -> None:
    mine, one, _ = turns_of(2 * SITES)
    theirs, _, _ = turns_of(2 * SITES)
    mine.take()
    before = [place.rests for place in one.groups]
    theirs.take()
    theirs.take()
    assert [place.rests for place in one.groups] == before


def test_a_turn_lasts_until_the_gradients_have_come() -> None:
    late = Late.starting(Schedule(1), PROBE_STEPS)
    assert late is not None
    late.turns = turns_of(2 * SITES)[0]
    late.took_place()
    pending = Forward()
    late.waiting.add(pending)
    # A second forward of the step.
    late.took_place()
    assert late.turns.taken == 1
    late.waiting.discard(pending)
    late.took_place()
    assert late.turns.taken == 2


def test_late_probes_of_a_model_look_at_all_in_turn() -> None:
    torch._dynamo.reset()
    depth = SITES + 2
    layers = [m for _ in range(depth) for m in (nn.Linear(32, 32), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(32, 32))
    options = {"inner": "eager", "emulate": True, "mods": "off", "probe_every": 1, "heads": ()}
    run = torch.compile(model, backend=loka_backend, options={**options, "libraries": "torch"})

    def batches() -> dict[int, tuple[int, int]]:
        found = {}
        for number in range(0, 2 * depth, 2):
            held = LEDGER.find(model[number].weight).statistics
            found[number] = (held[0, "x"].batches, held[0, "g"].batches)
        return found

    late = 0
    seen = set()
    for step in range(PROBE_STEPS + 12):
        before = batches() if step > PROBE_STEPS else {}
        run(torch.randn(16, 32)).square().sum().backward()
        if not before:
            continue
        after = batches()
        grown = {n for n in after if after[n][0] > before[n][0]}
        # With its input a site's gradient was looked at.
        assert grown == {n for n in after if after[n][1] > before[n][1]}
        assert len(grown) <= SITES
        late += bool(grown)
        seen |= grown
    assert late >= 4 and seen == set(range(0, 2 * depth, 2))
