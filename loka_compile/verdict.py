"""What ranks agree on, and how it is written down for the others (`agreement.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

from loka_compile.failure_board import Failure
from loka_compile.plan import Plan
from loka_compile.plan import SitePlan

Plans = Mapping[str, SitePlan]
#: (site, direction, why) of a kernel that a rank cannot run.
Objection = tuple[str, str, str]


@dataclass(frozen=True)
class Verdict:
    """What the ranks agreed on. plans: empty when nothing of it may leave high precision, or when
    they could not talk, and then `why` says so."""

    plans: Plans
    digest: str = ""
    objections: tuple[tuple[int, Objection], ...] = ()
    #: Ranks that were asked and did not answer.
    missing: tuple[int, ...] = ()
    why: str = ""
    #: Those that it was made with.
    ranks: tuple[int, ...] = ()
    #: What this rank cannot run of it, and was not asked about: the others have to hear of it.
    late: tuple[Objection, ...] = ()

    def __str__(self) -> str:
        said = [self.why] if self.why else [f"all ranks run one plan ({self.digest[:12]})"]
        if len(self.ranks) == 1 and not self.missing and not self.why:
            said = [f"rank {self.ranks[0]} made a plan alone ({self.digest[:12]}): no other rank "
                    "had joined it by then"]  # fmt: skip
        if self.missing:
            silent = ", ".join(map(str, self.missing))
            said.append(f"made without rank {silent}, which did not answer")
        reasons: dict[tuple[int, str], set[str]] = {}
        for rank, (site, direction, why) in self.objections:
            reasons.setdefault((rank, why), set()).add(f"{site} {direction}")
        for (rank, why), where in reasons.items():
            said.append(
                f"high precision on every rank, because of rank {rank}, at {_some(where)}: {why}"
            )
        if self.late:
            where = {f"{site} {direction}" for site, direction, _ in self.late}
            why = "; ".join(dict.fromkeys(why for *_, why in self.late))
            said.append(f"this rank came too late to be asked; it cannot run {_some(where)}: {why}")
        return "; ".join(said)


def _some(where: set[str]) -> str:
    return ", ".join(sorted(where)[:3]) + (", ..." if len(where) > 3 else "")


def low(plans: Plans) -> list[tuple[str, str]]:
    """(site, direction) of what leaves high precision."""
    return [
        (site, direction)
        for site, plan in plans.items()
        for direction, choice in plan.directions.items()
        if choice.is_low
    ]


def failures(plans: Plans, objections: Iterable[Objection]) -> list[Failure]:
    """The kernels that are objected to, as a rank that cannot run them tells of it."""
    found = []
    for site, direction, why in objections:
        plan = plans.get(site)
        if plan is not None and plan.choice(direction).is_low:
            kernel = plan.choice(direction).kernel
            found.append((kernel, direction, plan.K, plan.N, f"refused there: {why}"))
    return found


def without(plans: Plans, objections: Iterable[tuple[int, Objection]]) -> dict[str, SitePlan]:
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


def first_of_each(objections: Iterable[tuple[int, Objection]]) -> list[tuple[int, Objection]]:
    """One objection to each kernel, which is all that counts: with those of a thousand ranks the
    text would be larger than a store takes."""
    found: dict[tuple[str, str], tuple[int, Objection]] = {}
    for rank, (site, direction, why) in objections:
        found.setdefault((site, direction), (rank, (site, direction, why)))
    return list(found.values())


@dataclass(frozen=True)
class Final:
    """The last word of a talk. at: the call at which it is to come into force."""

    plans: Plans
    digest: str
    at: int
    ranks: tuple[int, ...]
    objections: tuple[tuple[int, Objection], ...]
    missing: tuple[int, ...]

    @classmethod
    def read(cls, text: str) -> Final:
        """Raises ValueError, or what comes of a text that is none."""
        said = json.loads(text)
        plan = Plan.from_dict(said["plan"])
        if plan.digest() != said["digest"]:
            raise ValueError(f"the plan that was sent has the hash {said['digest']}, not this one")
        objections = [(int(r), (str(a), str(b), str(c))) for r, (a, b, c) in said["objections"]]
        return cls(
            plan.sites,
            said["digest"],
            int(said["at"]),
            tuple(said["ranks"]),
            tuple(objections),
            tuple(said["missing"]),
        )


def final_text(
    plans: Plans,
    at: int,
    ranks: Sequence[int],
    objections: Sequence[tuple[int, Objection]],
    missing: Sequence[int] = (),
) -> str:
    """As `Final.read` reads it."""
    plan = Plan(sites=plans)
    body: dict[str, Any] = {"plan": plan.to_dict(), "digest": plan.digest()}
    body |= {"at": at, "ranks": list(ranks), "missing": list(missing)}
    return json.dumps({**body, "objections": list(objections)})
