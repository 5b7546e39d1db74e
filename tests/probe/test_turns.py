"""Sites take turns at late probes; all are looked at early, and as often as each other later."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch import nn

from loka_compile import loka_backend
from loka_compile.binding import Pending
from loka_compile.ledger import LEDGER
from loka_compile.options import PROBE_STEPS
from loka_compile.probe import turns
from loka_compile.probe.schedule import Schedule
from loka_compile.probe.turns import SITES
from loka_compile.probe.turns import Turns
from loka_compile.probing import Late


def counters(*names: str) -> dict[str, list[Tensor]]:
    return {name: [torch.zeros(3), torch.zeros(3)] for name in names}


@pytest.mark.parametrize("count", [1, SITES, SITES + 1, 3 * SITES + 2])
def test_every_site_is_asked_once_a_round(count) -> None:
    held = counters(*(f"site{i}" for i in range(count)))
    own = Turns(held)
    rounds = -(-count // SITES)
    assert len(own.groups) == rounds
    for _ in range(2):
        asked = []
        for _ in range(rounds):
            own.take()
            now = [n for n, two in held.items() if not turns.rests(two[0])]
            # A site's input and its gradient are looked at in the same steps.
            assert all(turns.rests(a) == turns.rests(b) for a, b in held.values())
            assert 0 < len(now) <= SITES
            asked += now
        assert sorted(asked) == sorted(held)
    turns.all_look(t for two in held.values() for t in two)
    assert not any(turns.rests(t) for two in held.values() for t in two)


def test_turns_of_one_graph_leave_those_of_another() -> None:
    one, other = (counters(*(f"{p}{i}" for i in range(2 * SITES))) for p in "ab")
    mine, theirs = Turns(one), Turns(other)
    mine.take()
    before = {n: turns.rests(two[0]) for n, two in one.items()}
    theirs.take()
    theirs.take()
    turns.all_look(t for two in other.values() for t in two)
    assert {n: turns.rests(two[0]) for n, two in one.items()} == before
    turns.all_look(t for two in one.values() for t in two)


def test_counters_that_are_gone_silence_nobody() -> None:
    held = counters(*(f"site{i}" for i in range(3 * SITES)))
    gone = Turns(held)
    gone.take()
    # Freed, and their places taken by other sites' counters: here they are the same tensors.
    rested = [t for two in held.values() for t in two if turns.rests(t)]
    assert rested
    del gone
    assert not any(map(turns.rests, rested))
    few = Turns({"a": rested[:2]})
    few.take()
    assert not any(map(turns.rests, rested))


def test_a_turn_lasts_until_the_gradients_have_come() -> None:
    late = Late.starting(Schedule(1), PROBE_STEPS)
    assert late is not None
    late.turns = Turns(counters(*(f"site{i}" for i in range(2 * SITES))))
    late.took_place()
    pending = Pending()
    late.pending.add(pending)
    # A second forward of the step.
    late.took_place()
    assert late.turns.taken == 1
    late.pending.discard(pending)
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
