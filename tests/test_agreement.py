"""One plan on all ranks: the protocol alone over a store. Processes: `test_agreement_processes`."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from beside import DIRECTIONS
from beside import FP8
from beside import beside_another
from torch import nn

import loka_compile
from loka_compile import agreement
from loka_compile import changeover
from loka_compile import loka_backend
from loka_compile import ranks
from loka_compile.agreement import AHEAD
from loka_compile.agreement import ATTEMPTS
from loka_compile.agreement import Agreement
from loka_compile.ledger import LEDGER
from loka_compile.plan import Plan
from loka_compile.plan import SitePlan
from loka_compile.ranks import World


def plans_of(*names: str) -> dict[str, SitePlan]:
    return {n: SitePlan(n, 16, 32, 64, "float32", directions=dict.fromkeys(DIRECTIONS, FP8))
            for n in names}  # fmt: skip


class Rank:
    """One rank's side, called step by step in this process."""

    def __init__(self, store, rank: int, size: int, objections=(), facts: str = "same") -> None:
        self.store = store
        self.talk = Agreement(World(store, rank, size).channel("x"))
        self.objections, self.facts, self.asked = list(objections), facts, 0
        self.swapped: int | None = None
        self.verdict = None
        self.plans = plans_of("a", "b")

    def step(self, ready: bool = True) -> None:
        self.talk.clock += 1
        if not ready or self.swapped is not None:
            return
        self.verdict = self.talk.poll(self.facts, self._propose, lambda plans: self.objections)
        if self.verdict is not None:
            self.swapped = self.talk.clock

    def _propose(self):
        self.asked += 1
        return self.plans


def ranks_of(size: int, **own) -> list[Rank]:
    store = dist.HashStore()
    made = [Rank(store, r, size, **own.get(f"r{r}", {})) for r in range(size)]
    for one in made:
        one.talk.join()
    return made


def test_all_change_at_the_same_call_to_the_same_plan() -> None:
    three = ranks_of(3)
    for _ in range(12):
        for one in reversed(three):
            one.step()
    assert len({one.swapped for one in three}) == 1 and three[0].swapped <= 4 + AHEAD
    assert [one.asked for one in three] == [1, 0, 0]
    assert all(one.verdict.plans == plans_of("a", "b") for one in three)
    assert len({one.verdict.digest for one in three}) == 1 and "one plan" in str(three[1].verdict)


def test_a_rank_that_is_ahead_changes_with_the_others() -> None:
    """Hosts run ahead of their devices: by one call here when the plan is published."""
    a, b = ranks_of(2)
    b.step(ready=False)
    for _ in range(12):
        a.step()
        b.step()
    assert b.swapped == a.swapped


def test_an_objection_holds_on_every_rank_and_says_whose_it_is() -> None:
    two = ranks_of(2, r1={"objections": [("a", "fwd", "no FP8 units")]})
    for _ in range(12):
        for one in two:
            one.step()
    for one in two:
        choice = one.verdict.plans["a"].choice("fwd")
        assert not choice.is_fp8 and "rank 1: no FP8 units" in choice.reason
        assert choice.mere_clamped == 0.1
        assert one.verdict.plans["a"].choice("dgrad").is_fp8
        assert "because of rank 1, at a fwd: no FP8 units" in str(one.verdict)


def test_what_is_sent_does_not_grow_with_the_ranks() -> None:
    many = ranks_of(
        8, **{f"r{r}": {"objections": [("a", "fwd", f"{r} is odd")]} for r in range(1, 8)}
    )
    for _ in range(20):
        for one in many:
            one.step()
    for one in many:
        assert one.verdict.objections == ((1, ("a", "fwd", "1 is odd")),)
        assert not one.verdict.plans["a"].choice("fwd").is_fp8


def test_ranks_whose_models_differ_stay_in_high_precision() -> None:
    two = ranks_of(2, r0={"facts": "the Mods on"}, r1={"facts": "the Mods off"})
    for _ in range(12):
        for one in two:
            one.step()
    for one in two:
        assert not any(c.is_fp8 for p in one.verdict.plans.values() for c in p.directions.values())
        assert "rank 0 has the Mods on, rank 1 the Mods off" in str(one.verdict)


def test_a_rank_that_can_run_nothing_ends_the_talk() -> None:
    store = dist.HashStore()
    a, b = Rank(store, 0, 2), Rank(store, 1, 2)
    a.talk.join()
    b.talk.refuse("compute capability 8.0 has no FP8 units")
    a.step()
    assert a.verdict.plans == {} and "rank 1" in str(a.verdict) and "8.0" in str(a.verdict)


def test_a_rank_that_never_answers_does_not_hold_up_the_rest(monkeypatch) -> None:
    monkeypatch.setattr(changeover, "PATIENCE_SECONDS", 0.0)
    a, b = ranks_of(2)
    for _ in range(3 * changeover.PATIENCE_CALLS):
        a.step()
    assert a.verdict.missing == (1,) and "without rank 1" in str(a.verdict)
    # It comes late, and takes what stands but for what it cannot run itself.
    b.objections = [("b", "wgrad", "late")]
    b.step()
    assert b.swapped is None or b.talk.clock >= a.swapped
    for _ in range(a.swapped):
        b.step()
    assert b.verdict.digest == a.verdict.digest
    assert not b.verdict.plans["b"].choice("wgrad").is_fp8


def test_without_rank_0_the_first_of_the_others_leads(monkeypatch) -> None:
    """A pipeline: these layers do not exist on rank 0."""
    monkeypatch.setattr(changeover, "PATIENCE_SECONDS", 0.0)
    store = dist.HashStore()
    two = [Rank(store, r, 3) for r in (1, 2)]
    for one in two:
        one.talk.join()
    for _ in range(2 * changeover.PATIENCE_CALLS):
        for one in two:
            one.step()
    assert two[0].swapped == two[1].swapped and [one.asked for one in two] == [1, 0]


def test_who_cannot_propose_leaves_all_in_high_precision() -> None:
    a, b = ranks_of(2)

    def propose():
        raise RuntimeError("out of luck")

    a._propose = propose
    for _ in range(4):
        a.step()
        b.step()
    assert a.verdict.plans == b.verdict.plans == {} and "out of luck" in str(b.verdict)


@pytest.mark.parametrize("lost_after", [1, 2, 3])
def test_who_proposes_and_is_lost_holds_up_nobody_for_good(monkeypatch, lost_after) -> None:
    """Lost before it proposes, before it concludes, before all know when."""
    monkeypatch.setattr(changeover, "PATIENCE_SECONDS", 0.0)
    a, b, c = ranks_of(3, r1={"objections": [("a", "fwd", "no FP8 units")]})
    for step in range(4 * changeover.PATIENCE_CALLS):
        if step < lost_after:
            a.step()
        b.step()
        c.step()
    assert b.swapped == c.swapped is not None and b.verdict.plans == c.verdict.plans
    assert b.verdict.plans["b"].choice("fwd").is_fp8
    assert [one.asked for one in (a, b, c)] == ([0, 1, 0] if lost_after == 1 else [1, 0, 0])
    # The last one it has seen itself: to the others it is there.
    assert b.talk.changeover.missing == ([] if lost_after == 3 else [0] * (lost_after == 2))
    assert b.verdict.missing == ((0,) if lost_after == 1 else ())


class Counted:
    """A store, and how often it was asked."""

    def __init__(self) -> None:
        self.store, self.asked = dist.HashStore(), 0

    def __getattr__(self, name):
        self.asked += 1
        return getattr(self.store, name)


def test_who_waits_asks_the_store_little_and_ever_less() -> None:
    """Each question is a round trip to rank 0's host, for each graph at each call."""
    store = Counted()
    made = [Rank(store, r, 64) for r in range(3)]
    for one in made:
        one.talk.join()
    asked: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(80):
        for rank, counts in asked.items():  # The third is not ready, for as long as this takes.
            before = store.asked
            made[rank].step()
            counts.append(store.asked - before)
    assert max(asked[0][1:]) <= 4 and max(asked[1][1:]) <= 2
    assert sum(asked[0][16:]) <= 4 * 9 and sum(asked[1][16:]) <= 2 * 9
    before = store.asked
    made[2].talk.poll("same", dict, lambda plans: [])
    assert store.asked - before <= 6


def test_a_damaged_plan_and_a_lost_store_are_said(monkeypatch) -> None:
    a, b = ranks_of(2)
    numbers = itertools.count()
    monkeypatch.setattr(Plan, "digest", lambda self: str(next(numbers)))
    a.talk.refuse("x")
    for _ in range(ATTEMPTS):
        b.step()
    assert "has the hash" in b.verdict.why and b.verdict.plans == {}

    class Gone:
        def __getattr__(self, name):
            raise RuntimeError("connection reset")

    gone = Gone()
    lost = Rank(gone, 0, 2)
    lost.talk.join()
    while lost.verdict is None and lost.talk.clock < 2 * ATTEMPTS:
        lost.step()
    assert lost.talk.clock > 1
    assert "connection reset" in lost.verdict.why


def test_a_process_without_distributed_pays_nothing(monkeypatch) -> None:
    """No store is looked for, no binding talks, and the plan comes at the step after the eighth."""
    monkeypatch.setattr(ranks._compat, "default_store", None)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    options = {"inner": "eager", "emulate": True, "mods": "off"}
    run = torch.compile(model, backend=loka_backend, options=options)
    for step in range(10):
        run(torch.randn(16, 32)).sum().backward()
        assert loka_compile.plan_of(model).active == (step >= 8)
    assert not LEDGER.entry(model[0].weight).agreements
    assert agreement.about([("a", 1, 2)], {}) is None


def small() -> nn.Sequential:
    torch._dynamo.reset()
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


@pytest.mark.parametrize("disturbed", [False, True])
def test_what_stands_and_is_not_in_force_yet_outlives_a_new_binding(monkeypatch, disturbed) -> None:
    """Decisions about other layers, or a first backward, bind a graph anew at any step."""
    other = beside_another(monkeypatch)
    model = small()
    options = {"inner": "eager", "emulate": True, "mods": "off", "recipes": ["rowwise"]}
    run = torch.compile(model, backend=loka_backend, options=options)
    theirs, swap = None, None
    for step in range(20):
        run(torch.randn(16, 32)).sum().backward()
        if swap is None and loka_compile.plan_of(model).active:
            swap = step + 1
        (ours,) = LEDGER.entry(model[0].weight).agreements.values()
        if theirs is None:
            theirs = Agreement(other.channel(ours.channel.name))
            theirs.join()
        theirs.clock += 1
        theirs.poll("the Mods off", dict, lambda plans: [("0", "fwd", "no FP8 units")])
        if disturbed and ours.verdict is not None:
            LEDGER.touch()
    assert swap == ours.changeover.at == theirs.changeover.at and ours.settled
    first = loka_compile.plan_of(model).sites["0"]
    assert not first.choice("fwd").is_fp8 and "no FP8 units" in first.choice("fwd").reason
    assert first.choice("wgrad").is_fp8


def test_every_graph_runs_the_plan_that_was_agreed_on(monkeypatch) -> None:
    """Training and inference, a graph of a later shape; another plan is talked about anew."""
    other = beside_another(monkeypatch)
    model = small()
    given = Plan(sites={n: SitePlan(n, 16, k, 96 - k, "float32",
                                    directions=dict.fromkeys(DIRECTIONS, FP8))
                        for n, k in (("0", 32), ("2", 64))})  # fmt: skip
    options = {"inner": "eager", "emulate": True, "mods": "off", "plan": given}
    run = torch.compile(model, backend=loka_backend, dynamic=False, options=options)

    def forward_of_first() -> str:
        return loka_compile.plan_of(model).sites["0"].kernels[0]

    theirs = None
    for _ in range(20):
        run(torch.randn(16, 32)).sum().backward()
        (ours,) = LEDGER.entry(model[0].weight).agreements.values()
        if theirs is None:
            theirs = Agreement(other.channel(ours.channel.name))
            theirs.join()
            assert forward_of_first() == "torch:rowwise"
        theirs.clock += 1
        theirs.poll("the Mods off", dict, lambda plans: [("0", "fwd", "no FP8 units")])
    assert ours.settled and forward_of_first() == "high_precision"
    run(torch.randn(48, 32)).sum().backward()
    assert forward_of_first() == "high_precision"
    with torch.no_grad():
        run(torch.randn(24, 32))
    assert forward_of_first() == "high_precision"
    assert len(LEDGER.entry(model[0].weight).agreements) == 1
    changed = Plan(sites={"0": given.sites["0"]})
    torch._dynamo.reset()
    run = torch.compile(model, backend=loka_backend, options={**options, "plan": changed})
    run(torch.randn(16, 32)).sum().backward()
    assert forward_of_first() == "torch:rowwise"
    assert len(LEDGER.entry(model[0].weight).agreements) == 2
