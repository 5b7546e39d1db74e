"""One plan for all ranks: rank 0 proposes, every rank may object, all change at the same call.

Ranks see different batches, and may sit on different devices, so plans made apart would differ.
What is said goes through the store that torch.distributed was set up with: no collective, so
nothing here can come between the collectives of the program, and no rank ever waits. Until the
plan is there each goes on in high precision:

    1 join       a rank that is to probe a graph says so
    2 ready      it has probed enough
    3 proposal   rank 0 decides from its own data
    4 answer     every other rank names the kernels that it cannot run, or that fail the accuracy
                 gate on its data
    5 final      rank 0 publishes the plan without those, its hash, and the call at which it comes
                 into force: a few calls ahead of the rank that is furthest

A rank on which nothing can run FP8 publishes the final plan itself: all in high precision. Ranks
that hold other layers (pipelines) never join, and make their own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

from loka_compile.plan import Plan
from loka_compile.plan import SitePlan
from loka_compile.ranks import Channel
from loka_compile.ranks import world

log = logging.getLogger("loka_compile")

Plans = Mapping[str, SitePlan]
#: (site, direction, why) of a kernel that a rank cannot run.
Objection = tuple[str, str, str]

#: Calls between the furthest rank and the swap: every rank looks at the store once per call, so two
#: are enough, and one is for a rank that is past its look.
AHEAD = 3
#: Calls, and seconds, that a rank waits for the others before it goes on without them.
PATIENCE_CALLS = 64
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Verdict:
    """What the ranks agreed on. plans: empty when they could not talk, and `why` says so."""

    plans: Plans
    digest: str = ""
    objections: tuple[tuple[int, Objection], ...] = ()
    #: Ranks that were asked and did not answer.
    missing: tuple[int, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        said = [self.why] if self.why else [f"all ranks run one plan ({self.digest[:12]})"]
        if self.missing:
            silent = ", ".join(map(str, self.missing))
            said.append(f"made without rank {silent}, which did not answer")
        reasons: dict[tuple[int, str], set[str]] = {}
        for rank, (site, direction, why) in self.objections:
            reasons.setdefault((rank, why), set()).add(f"{site} {direction}")
        for (rank, why), where in reasons.items():
            shown = ", ".join(sorted(where)[:3]) + (", ..." if len(where) > 3 else "")
            said.append(f"high precision on every rank, because of rank {rank}, at {shown}: {why}")
        return "; ".join(said)


def about(
    sites: Iterable[tuple[Any, ...]], held: dict[str, Agreement], given: str = ""
) -> Agreement | None:
    """The agreement about one set of parameters; None where there is nobody to agree with.

    sites: what makes two ranks speak of the same layers. held: the parameter's own record, through
    which a later graph of the same parameters finds it again. given: the hash of the plan that this
    rank was given, which may be another one elsewhere: each plan is talked about anew. The n-th
    talk with equal sites on one rank is the n-th of the others.
    """
    here = world()
    if here is None:
        return None
    name = here.name_of(sites)
    found = held.get(name + given)
    if found is None or found.channel.world is not here:
        found = held[name + given] = Agreement(here.channel(name))
    return found


class Agreement:
    """One rank's side of it. `clock` counts the training calls of these parameters."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.clock = 0
        self.verdict: Verdict | None = None
        #: The verdict came into force. Until then a graph that is bound anew joins again.
        self.settled = False
        self._swap_at = 0
        self._proposal: Plans | None = None
        self._answered = False
        self._refused = False
        self._waiting = (0, 0.0)

    def join(self) -> None:
        """Say that this rank is to probe the graph: the others wait for it."""
        self._safely(lambda: self.channel.once("joined", ""))

    def poll(
        self,
        facts: str,
        propose: Callable[[], Plans],
        object_to: Callable[[Plans], list[Objection]],
    ) -> Verdict | None:
        """One look at the store, at the start of a call; the verdict once it is in force.

        facts: what must be equal on all ranks for a common plan to mean anything.
        """
        if self.verdict is None:
            self._safely(lambda: self._talk(facts, propose, object_to))
        self.settled = self.verdict is not None and self.clock >= self._swap_at
        return self.verdict if self.settled else None

    def refuse(self, why: str) -> None:
        """Nothing of this graph can leave high precision on this rank, so nothing does elsewhere.

        Others hear of it when they are ready; this rank has no more to say.
        """
        if self._refused:
            return
        self._refused = True
        self._safely(lambda: self._end(why))

    # -- the talk ---------------------------------------------------------------------------------

    def _talk(
        self,
        facts: str,
        propose: Callable[[], Plans],
        object_to: Callable[[Plans], list[Objection]],
    ) -> None:
        self.channel.once("ready", facts)
        self.channel.put(f"clock/{self.channel.rank}", str(self.clock))
        if self.channel.has("final"):
            self._take(object_to)
            return
        leader = self._leader()
        if leader == self.channel.rank:
            self._lead(facts, propose)
        elif leader is not None and not self._answered and self.channel.has("proposal"):
            self._answered, self._waiting = True, (0, 0.0)
            plans = Plan.from_dict(json.loads(self.channel.get("proposal"))).sites
            self.channel.once("answered", json.dumps(object_to(plans)))
        elif self._answered and self._impatient():
            self._end(f"rank {leader} has not answered")

    def _leader(self) -> int | None:
        """Rank 0, unless it does not join; the others wait for it a while."""
        first = 0
        if not self.channel.has("joined/0"):
            if not self._impatient():
                return None
            first = self.channel.ranks("joined")[0]
        return int(self.channel.first("leader", str(first)))

    def _lead(self, facts: str, propose: Callable[[], Plans]) -> None:
        joined = self.channel.count("joined")
        if self._proposal is None:
            if self.channel.count("ready") < joined and not self._impatient():
                return
            self._proposal = propose()
            self.channel.put("proposal", json.dumps(Plan(sites=self._proposal).to_dict()))
            self._waiting = (0, 0.0)
        if self.channel.count("answered") < joined - 1 and not self._impatient():
            return
        objections: list[tuple[int, Objection]] = []
        missing = []
        for rank in self.channel.ranks("joined"):
            if rank == self.channel.rank:
                continue
            if not self.channel.has(f"answered/{rank}"):
                missing.append(rank)
                continue
            theirs = self.channel.get(f"ready/{rank}")
            said = json.loads(self.channel.get(f"answered/{rank}"))
            objections += [(rank, (str(a), str(b), str(c))) for a, b, c in said]
            if theirs != facts:
                why = f"rank {self.channel.rank} has {facts}, rank {rank} {theirs}"
                objections += [(rank, (s, d, why)) for s, d in _low(self._proposal)]
        plans = _without(self._proposal, objections)
        clocks = [int(self.channel.get(f"clock/{r}")) for r in self.channel.ranks("clock")]
        final = _encode(plans, max(clocks) + AHEAD, objections, missing)
        self._answered = True
        self.channel.first("final", final)
        self._take(lambda plans: [])

    def _take(self, object_to: Callable[[Plans], list[Objection]]) -> None:
        said = json.loads(self.channel.get("final"))
        plan = Plan.from_dict(said["plan"])
        if plan.digest() != said["digest"]:
            raise ValueError(f"the plan that was sent has the hash {said['digest']}, not this one")
        objections = [(int(r), (str(a), str(b), str(c))) for r, (a, b, c) in said["objections"]]
        plans: Plans = plan.sites
        if not self._answered:
            # Too late to be asked: what cannot run here stays in high precision here.
            late = [(self.channel.rank, one) for one in object_to(plans)]
            objections, plans = objections + late, _without(plans, late)
        self._swap_at = int(said["swap_at"])
        self.verdict = Verdict(plans, said["digest"], tuple(objections), tuple(said["missing"]))

    def _end(self, why: str) -> None:
        """End the talk for everyone: all in high precision, unless a plan stands already."""
        own = (self.channel.rank, ("every site", "all directions", why))
        final = _encode({}, swap_at=0, objections=[own], missing=[])
        self.channel.first("final", final)

    def _safely(self, call: Callable[[], Any]) -> None:
        """A store that is gone, or a message that cannot be read, never ends the program."""
        try:
            call()
        except Exception as error:
            log.debug("agreement failed", exc_info=error)
            why = f"ranks could not agree on a plan ({type(error).__name__}: {error})"
            self.verdict, self._swap_at = Verdict({}, why=why), 0
            with contextlib.suppress(Exception):
                self._end(why)

    def _impatient(self) -> bool:
        calls, since = self._waiting
        since = since or time.monotonic()
        self._waiting = (calls + 1, since)
        return calls >= PATIENCE_CALLS and time.monotonic() - since >= PATIENCE_SECONDS


def _encode(
    plans: Plans, swap_at: int, objections: list[tuple[int, Objection]], missing: list[int]
) -> str:
    plan = Plan(sites=plans)
    return json.dumps(
        {
            "plan": plan.to_dict(),
            "digest": plan.digest(),
            "swap_at": swap_at,
            "objections": objections,
            "missing": missing,
        }
    )


def _low(plans: Plans) -> list[tuple[str, str]]:
    return [
        (site, direction)
        for site, plan in plans.items()
        for direction, choice in plan.directions.items()
        if choice.is_low
    ]


def _without(plans: Plans, objections: list[tuple[int, Objection]]) -> dict[str, SitePlan]:
    """`plans` with high precision where a rank objects, and its reason."""
    reasons: dict[tuple[str, str], str] = {}
    for rank, (site, direction, why) in objections:
        reasons.setdefault((site, direction), f"rank {rank}: {why}")
    changed = {}
    for site, plan in plans.items():
        directions = dict(plan.directions)
        for direction, choice in plan.directions.items():
            why_not = reasons.get((site, direction))
            if why_not is not None and choice.is_low:
                directions[direction] = choice.kept_high(f"{choice.kernel}: {why_not}")
        changed[site] = replace(plan, directions=directions)
    return changed
