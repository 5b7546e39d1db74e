"""One plan for all ranks: one proposes, every rank may object, all change at the same call.

Ranks see different batches, and may sit on different devices, so plans made apart would differ.
What is said goes through the store that torch.distributed was set up with: no collective, so
nothing here can come between the collectives of the program, and no rank ever waits. Until the
plan is there each goes on in high precision:

    1 join       a rank that is to probe a graph says so, before it compiles it
    2 ready      it has probed enough
    3 proposal   rank 0 decides from its own data; another where that does not come
    4 answer     every other rank names the kernels that it cannot run, or that fail the accuracy
                 gate on its data
    5 final      who proposed publishes the plan without those; another where that does not come
    6 change     at one call on all ranks (`changeover.py`)

Of each of 3 and 5 the first that is said stands, whoever said it, so a rank that is lost or late
holds up nobody for good. A rank on which nothing can run FP8 publishes the final plan itself: all
in high precision. Ranks that hold other layers (pipelines) never join, and make their own.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

from loka_compile.changeover import AHEAD
from loka_compile.changeover import Changeover
from loka_compile.changeover import Wait
from loka_compile.failure_board import Failure
from loka_compile.plan import Plan
from loka_compile.ranks import Channel
from loka_compile.ranks import world
from loka_compile.verdict import Final
from loka_compile.verdict import Objection
from loka_compile.verdict import Plans
from loka_compile.verdict import Verdict
from loka_compile.verdict import failures
from loka_compile.verdict import final_text
from loka_compile.verdict import first_of_each
from loka_compile.verdict import low
from loka_compile.verdict import without

log = logging.getLogger("loka_compile")

#: How often something is said again, at once, where the store raises: whatever is said twice is
#: said once. Where that failed at as many calls in a row it counts as gone.
ATTEMPTS = 3


def about(
    sites: Iterable[tuple[Any, ...]],
    held: dict[str, Agreement],
    given: str = "",
    again: bool = False,
) -> Agreement | None:
    """The agreement about one set of parameters; None where there is nobody to agree with.

    sites: what makes two ranks speak of the same layers. held: the parameter's own record, through
    which a later graph of the same parameters finds it again. given: the hash of the plan that this
    rank was given, which may be another one elsewhere: each plan is talked about anew. again: what
    has been agreed on does not answer the question, which is another one by now (other options).
    The n-th talk with equal sites on one rank is the n-th of the others.
    """
    here = world()
    if here is None:
        return None
    name = here.name_of(sites)
    found = held.get(name + given)
    if found is None or found.channel.world is not here or (again and found.settled):
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
        #: When it does; None where that makes no difference.
        self.changeover: Changeover | None = None
        #: Kernels that all have agreed on and this rank cannot run, for it was not asked.
        self.unheard: list[Failure] = []
        #: Who proposed what.
        self._by: int | None = None
        self._proposal: Plans = {}
        self._answered = False
        self._refused = False
        #: Calls in a row at which the store could not be asked.
        self._failures = 0
        #: For what comes next, from the first look on.
        self._wait: Wait | None = None

    def join(self) -> None:
        """Say that this rank is to probe the graph: the others wait for it."""
        self._safely(lambda: self.channel.once("joined", ""))

    def poll(
        self,
        facts: str,
        propose: Callable[[], Plans],
        object_to: Callable[[Plans], list[Objection]],
        may: bool = True,
        given: bool = False,
    ) -> Verdict | None:
        """One look at the store, at the start of a call; the verdict once it is in force.

        facts: what must be equal on all ranks for a common plan to mean anything. may: False where
        this call must run what the last one ran. given: something else is in force until then, so
        that it matters when the verdict is, even one that leaves all in high precision.
        """
        wait = self._wait = self._wait or Wait(self.clock)
        if self.verdict is None and wait.looks(self.clock):
            self._safely(lambda: self._talk(facts, propose, object_to, given))
        if self.verdict is None:
            return None
        change = self.changeover
        if change is not None and not change.in_force:
            self._safely(lambda: change.look(self.clock, may))
        if not may or not (self.changeover is None or self.changeover.in_force):
            return None
        self.settled = True
        return self.verdict

    def refuse(self, why: str) -> None:
        """Nothing of this graph can leave high precision here, so nothing does on other ranks."""
        if not self._refused:
            self._refused = True
            self._safely(lambda: self._refuse(why))

    # -- the talk ---------------------------------------------------------------------------------

    def _talk(
        self,
        facts: str,
        propose: Callable[[], Plans],
        object_to: Callable[[Plans], list[Objection]],
        given: bool,
    ) -> None:
        self.channel.once("joined", "")
        self.channel.once("ready", facts)
        if not self.channel.has("final") and not self._is_concluded(propose, object_to):
            return
        self._take(object_to, given)

    def _is_concluded(
        self, propose: Callable[[], Plans], object_to: Callable[[Plans], list[Objection]]
    ) -> bool:
        """True once the final plan is there."""
        if self._by is None:
            try:
                if not self._hear_proposal(propose):
                    return False
            except _NoProposalError as error:
                self._end(str(error))
                return True
        if self._by != self.channel.rank and not self._answered:
            self._answer(object_to)
        return self._conclude()

    def _hear_proposal(self, propose: Callable[[], Plans]) -> bool:
        """True once there is one, of this rank or another."""
        channel = self.channel
        if channel.has("proposal"):
            text = channel.get("proposal")
        elif self._is_late() or (channel.rank == 0 and self._all_ready()):
            try:
                plan = Plan(sites=propose())
            except Exception as error:
                log.debug("no proposal", exc_info=error)
                why = f"no plan could be made ({type(error).__name__}: {error})"
                raise _NoProposalError(why) from error
            body = {"by": channel.rank, "plan": plan.to_dict()}
            text = channel.first("proposal", json.dumps(body))
        else:
            return False
        said = json.loads(text)
        self._proposal, self._by = Plan.from_dict(said["plan"]).sites, int(said["by"])
        self._wait = Wait(self.clock)
        return True

    def _is_late(self) -> bool:
        """The others have been waited for long enough."""
        return self._wait is not None and self._wait.is_over(self.clock)

    def _all_ready(self) -> bool:
        if self.channel.count("ready") < self.channel.count("joined"):
            return False
        ready = (f"ready/{r}" for r in self.channel.ranks("joined"))
        return self.channel.has(*ready)

    def _answer(self, object_to: Callable[[Plans], list[Objection]]) -> None:
        answer = {"clock": self.clock, "objections": _asked(object_to, self._proposal)}
        self.channel.once("answered", json.dumps(answer))
        self._answered = True

    def _conclude(self) -> bool:
        """Publish the final plan, where it is this rank's to do and every answer is there."""
        channel, by, late = self.channel, self._by, self._is_late()
        assert by is not None
        if not late and (
            by != channel.rank or channel.count("answered") < channel.count("joined") - 1
        ):
            return False
        joined = channel.ranks("joined")
        answers = channel.said("answered", [r for r in joined if r != by])
        missing = [r for r in joined if r != by and r not in answers]
        if missing and not late:
            return False
        facts = channel.said("ready", [by, *answers])
        objections: list[tuple[int, Objection]] = []
        clocks = [self.clock]
        for rank, text in answers.items():
            said = json.loads(text)
            clocks.append(int(said["clock"]))
            objections += [(rank, (str(a), str(b), str(c))) for a, b, c in said["objections"]]
            if facts[rank] != facts[by]:
                why = f"rank {by} has {facts[by]}, rank {rank} {facts[rank]}"
                objections += [(rank, (s, d, why)) for s, d in low(self._proposal)]
        plans, ranks = without(self._proposal, objections), sorted({by, *answers})
        told = first_of_each(objections)
        channel.first("final", final_text(plans, max(clocks) + AHEAD, ranks, told, missing))
        return True

    def _take(self, object_to: Callable[[Plans], list[Objection]], given: bool) -> None:
        final = Final.read(self.channel.get("final"))
        plans, rank = final.plans, self.channel.rank
        late: list[Objection] = []
        if rank not in final.ranks:
            # What cannot run here stays in high precision here, and the others are told.
            late = _asked(object_to, plans)
            self.unheard = failures(plans, late)
            plans = without(plans, [(rank, one) for one in late])
        if given or plans:
            self.changeover = Changeover(self.channel, self.clock, final.at, final.ranks)
        self.verdict = Verdict(
            plans,
            final.digest,
            final.objections,
            final.missing,
            ranks=final.ranks,
            late=tuple(late),
        )

    def _end(self, why: str) -> Final:
        """End the talk for everyone: all in high precision, unless a plan stands already."""
        if self.channel.has("final"):
            return Final.read(self.channel.get("final"))
        own = (self.channel.rank, ("every site", "all directions", why))
        joined = self.channel.ranks("joined")
        text = final_text({}, at=self.clock + AHEAD, ranks=joined, objections=[own])
        return Final.read(self.channel.first("final", text))

    def _refuse(self, why: str) -> None:
        plans = self._end(why).plans
        self.unheard = failures(plans, [(site, direction, why) for site, direction in low(plans)])

    def _safely(self, call: Callable[[], Any]) -> None:
        """A store that is gone, or a message that cannot be read, never ends the program."""
        why = ""
        for _ in range(ATTEMPTS):
            try:
                call()
            except Exception as error:
                log.debug("agreement failed", exc_info=error)
                why = f"{type(error).__name__}: {error}"
            else:
                self._failures = 0
                return
        if self.changeover is None or not self.changeover.look_alone(self.clock):
            self._failures += 1
            if self._failures >= ATTEMPTS:
                self._give_up(f"ranks could not agree on a plan ({why})")

    def _give_up(self, why: str) -> None:
        self.verdict, self.changeover = Verdict({}, why=why), None
        with contextlib.suppress(Exception):
            # Heard: then it holds here as it does there.
            stands = self._end(why)
            if not low(stands.plans):
                self.verdict = Verdict({}, stands.digest, stands.objections, ranks=stands.ranks)


class _NoProposalError(Exception):
    """Making it failed."""


def _asked(object_to: Callable[[Plans], list[Objection]], plans: Plans) -> list[Objection]:
    """The objections; against all of it, where they cannot be told."""
    try:
        return object_to(plans)
    except Exception as error:
        log.debug("no answer", exc_info=error)
        why = f"could not be checked ({type(error).__name__}: {error})"
        return [(site, direction, why) for site, direction in low(plans)]
