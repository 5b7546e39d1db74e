"""Random schedules of 2 to 4 ranks, in one process: they agree, at one call, and none waits.

Interleaved at every question to the store: before one is answered others may call, any number of
times. What a seed finds it finds again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from dataclasses import field

import pytest
import torch.distributed as dist

from loka_compile import changeover
from loka_compile.agreement import Agreement
from loka_compile.plan import Choice
from loka_compile.plan import SitePlan
from loka_compile.ranks import World
from loka_compile.verdict import Verdict
from loka_compile.verdict import low
from loka_compile.verdict import without

DIRECTIONS = ("fwd", "dgrad", "wgrad")


def plans_by(rank: int) -> dict[str, SitePlan]:
    """What a rank proposes: its own, so that it shows whose came into force."""
    fp8 = Choice("torch:rowwise", "torch", "rowwise", mere_clamped=0.01 * rank)
    return {n: SitePlan(n, 16, 32, 64, "float32", directions=dict.fromkeys(DIRECTIONS, fp8))
            for n in ("a", "b")}  # fmt: skip


class Store:
    """One rank's connection: others may come in between, and answers may be lost."""

    def __init__(self, inner, simulation: Simulation, rank: int) -> None:
        self.inner, self.simulation, self.rank = inner, simulation, rank
        self.asked = 0

    def __getattr__(self, name):
        def call(*args):
            sim, one = self.simulation, self.simulation.ranks[self.rank]
            self.asked += 1
            sim.interleave(one)
            if name in ("get", "multi_get"):
                keys = args[0] if name == "multi_get" else [args[0]]
                assert self.inner.check(list(keys)), f"rank {self.rank} waits for {keys}"
            if one.gone:
                raise RuntimeError("connection reset")
            before, after = (sim.random.random() < sim.losses for _ in range(2))
            if before and one.failures < 2:
                one.failures += 1
                raise RuntimeError("not sent")
            found = getattr(self.inner, name)(*args)
            if after and one.failures < 2:
                one.failures += 1
                raise RuntimeError("no answer")
            one.failures = 0
            return found

        return call


@dataclass
class Rank:
    number: int
    simulation: Simulation
    joins_at: int
    ready_at: int
    dies_at: int
    loses_store_at: int
    facts: str
    objections: list = field(default_factory=list)
    given: bool = False
    refuses: bool = False
    #: Share of calls that must run as the last one did, and of those of a graph that is not ready.
    pending: float = 0.0
    other_graph: float = 0.0
    failures: int = 0
    gone: bool = False
    busy: bool = False
    calls: int = 0
    changed: int | None = None
    verdict: Verdict | None = None
    #: Calls that could have changed.
    could: list[int] = field(default_factory=list)
    most: int = 0
    talk: Agreement | None = None

    def call(self) -> None:
        """One training call: as `Peers.settle` goes on with a talk."""
        self.busy = True
        self.calls += 1
        self.gone |= self.calls >= self.loses_store_at
        sim = self.simulation
        if self.talk is None:
            self.talk = Agreement(sim.worlds[self.number].channel("x"))
        if self.calls == 1 + self.joins_at and not self.refuses:
            self.talk.join()
        if self.calls == 1 + self.joins_at and self.refuses:
            self.talk.refuse("no FP8 units")
        talk, before = self.talk, sim.stores[self.number].asked
        if self.calls > self.joins_at and not self.refuses:
            talk.clock += 1
            may = sim.random.random() >= self.pending
            ready = talk.clock > self.ready_at and sim.random.random() >= self.other_graph
            if not talk.settled and (talk.verdict is not None or (ready and may)):
                if may:
                    self.could.append(talk.clock)
                found = talk.poll(self.facts, self.propose, self.object_to, may, self.given)
                if found is not None:
                    self.changed, self.verdict = talk.clock, found
        self.most = max(self.most, sim.stores[self.number].asked - before)
        self.busy = False

    def propose(self) -> dict[str, SitePlan]:
        self.simulation.interleave(self)
        return without(plans_by(self.number), [(self.number, one) for one in self.objections])

    def object_to(self, plans):
        return [one for one in self.objections if one[0] in plans]


class Simulation:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        draw = self.random
        size = draw.randint(2, 4)
        #: How far nothing holds them together: calls between the first and the last.
        self.apart = draw.choice([1, 1, 2, 5, 40])
        self.between = draw.choice([0.0, 0.05, 0.3])
        self.losses = draw.choice([0.0, 0.0, 0.02])
        self.given = draw.random() < 0.3
        never = 10**9

        def rarely(p: float, value: int) -> int:
            return value if draw.random() < p else never

        self.ranks = [
            Rank(
                number,
                self,
                joins_at=draw.choice([0, 0, 0, 3]),
                ready_at=8 + draw.choice([0, 0, 0, 1, 6]),
                dies_at=rarely(0.1, draw.randint(1, 40)),
                loses_store_at=rarely(0.1, draw.randint(1, 40)),
                facts=draw.choice(["on"] * 9 + ["off"]),
                objections=draw.choice([[], [], [("a", "fwd", f"not on {number}")]]),
                given=self.given,
                refuses=draw.random() < 0.05,
                pending=draw.choice([0.0, 0.0, 0.3]),
                other_graph=draw.choice([0.0, 0.0, 0.5]),
            )
            for number in range(size)
        ]
        self.inner = dist.HashStore()
        self.stores = [Store(self.inner, self, r) for r in range(size)]
        self.worlds = [World(store, r, size) for r, store in enumerate(self.stores)]
        self.depth = 0

    def may_call(self, one: Rank) -> bool:
        alive = [r.calls for r in self.ranks if r.calls < r.dies_at]
        here = one.calls < one.dies_at and not one.busy
        return here and one.calls - min(alive, default=0) < self.apart

    def interleave(self, within: Rank) -> None:
        while self.depth < 3 and self.random.random() < self.between:
            callers = [r for r in self.ranks if r is not within and self.may_call(r)]
            if not callers:
                return
            self.depth += 1
            self.random.choice(callers).call()
            self.depth -= 1

    def run(self, calls: int) -> None:
        while any(r.calls < min(calls, r.dies_at) for r in self.ranks):
            self.random.choice([r for r in self.ranks if self.may_call(r)]).call()


@pytest.fixture(autouse=True)
def _patience(monkeypatch) -> None:
    monkeypatch.setattr(changeover, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(changeover, "PATIENCE_CALLS", 20)


@pytest.mark.parametrize("block", range(4))
def test_all_change_at_one_call_to_one_plan(block: int) -> None:
    changed = 0
    for seed in range(100 * block, 100 * block + 100):
        sim = Simulation(seed)
        sim.run(300)
        changed += check(sim, seed)
    assert changed > 50


def check(sim: Simulation, seed: int) -> bool:
    """True where a plan came into force on two ranks or more."""
    alive = [r for r in sim.ranks if r.dies_at > 300 and not r.refuses]
    talking = [r for r in alive if not r.gone]
    for one in alive:
        # Nobody is left without an answer, and what no rank but it decided it says.
        assert one.verdict is not None, (seed, one.number)
        assert one.most <= 12 + 6 * len(sim.ranks) or sim.losses, (seed, one.most)
    assert len({one.verdict.digest for one in talking}) <= 1, seed
    for one in talking:
        high = {(s, d) for s, d in low(plans_by(0))} - set(low(one.verdict.plans))
        for site, direction, _ in one.objections:
            assert (site, direction) in high, (seed, one.number)
            asked = one.number in one.verdict.ranks or not one.verdict.plans
            assert asked or one.talk.unheard, (seed, one.number)
    changes = [one for one in talking if one.talk.changeover is not None]
    assert sim.losses or not any(one.talk.changeover.alone for one in changes), seed
    changes = [one for one in changes if not one.talk.changeover.alone]
    final = {one.talk.changeover.at for one in changes}
    assert len(final) <= 1, (seed, final)
    for one in changes:
        if one.number in one.talk.changeover.ranks:
            first = min(c for c in one.could if c >= one.talk.changeover.at)
            assert one.changed == first, (seed, one.number, one.changed, first)
    return len(changes) > 1
