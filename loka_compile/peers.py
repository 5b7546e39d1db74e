"""The plans of one graph as its rank agrees on them with the others (`agreement.py`)."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from loka_compile import agreement
from loka_compile import demotion
from loka_compile import eligibility
from loka_compile.agreement import Agreement
from loka_compile.binding import Args
from loka_compile.binding import Binding
from loka_compile.capture import Source
from loka_compile.decisions import Decisions
from loka_compile.decisions import shown_name
from loka_compile.ledger import LEDGER
from loka_compile.ledger import Entry
from loka_compile.options import PROBE_STEPS
from loka_compile.options import Options
from loka_compile.plan import Plan
from loka_compile.plan import SitePlan
from loka_compile.telling import Teller
from loka_compile.verdict import Objection
from loka_compile.verdict import Verdict
from loka_compile.verdict import without


class Peers:
    def __init__(
        self, source: Source, options: Options, decisions: Decisions, teller: Teller
    ) -> None:
        self.source = source
        self.options = options
        self.decisions = decisions
        self.teller = teller

    def join(
        self,
        observed: Collection[str],
        weights: Mapping[str, Tensor],
        site_plans: Mapping[str, SitePlan],
    ) -> Agreement | None:
        """The talk that a plan for these weights is subject to; None without other ranks.

        observed: the sites that are to be. None also where there is nothing to talk about: no
        gradients, or decided already. To be called before the graph is compiled, which may take
        minutes: ranks that are done wait for those that have joined.
        """
        if not self.source.training or not weights or agreement.world() is None:
            return None
        eligible, pinned = self.decisions.eligible, self.decisions.pinned
        if eligible and not (site_plans if pinned else observed):
            return None
        sites = [
            (shown_name(s, weights.get(s.name)), s.k, s.n, str(s.dtype)) for s in self.source.sites
        ]
        first = next(iter(weights.values()))
        again = bool(eligible) and not pinned
        held = LEDGER.entry(first).agreements
        talk = agreement.about(sites, held, self.decisions.given, again)
        if talk is None or talk.settled:
            return None
        if not eligible:
            why = eligibility.why_none(self.source.sites, self.source.device, self.options)
            talk.refuse(why)
            _tell_late(talk)
            return None
        talk.join()
        return talk

    def settle(self, binding: Binding, positions: list[int], args: Args) -> bool:
        """Go on with the talk, at the start of a call; True once its outcome is in force.

        args: of that call, whose rows no probe has seen.
        """
        # Only here: with it come the kernels' first uses and their errors.
        from loka_compile import objections

        talk, pinned = binding.talk, self.decisions.pinned
        assert talk is not None
        # Not before others have had the time to join: a plan that was given is there at the first
        # call, when they may still compile. Collectives of the program hold later calls back.
        ready = talk.clock > PROBE_STEPS and (pinned or binding.ready)
        if talk.verdict is None and not (binding.quiet and ready):
            return False
        # What has been said comes into force at one call on all ranks, whichever graph of these
        # parameters it is: this one may be of a shape that has been met but once.
        may = binding.quiet
        facts = f"the Mods {binding.decision.mods.text(99)}"
        device, options = self.source.device, self.options
        if pinned:
            own = {p.name: p for p in binding.site_plans.values()}

            def object_to(plans: Mapping[str, SitePlan]) -> list[Objection]:
                return objections.to_plan(plans, None, device, options)

            def propose() -> Mapping[str, SitePlan]:
                # Who proposes must be able to run it, too.
                return without(own, [(talk.channel.rank, one) for one in object_to(own)])

            found = talk.poll(facts, propose, object_to, may, given=True)
            _tell_late(talk)
            if found is not None:
                self._tell(talk, found, own)
                self._pin(found, own, dict(zip(positions, binding.entries, strict=True)))
            return found is not None
        observed = self.decisions.observed(binding, positions)
        probed = {p.site.name: p for p in observed.probed}
        found = talk.poll(
            facts,
            lambda: self.decisions.propose(observed, args),
            lambda plans: objections.to_plan(plans, probed, device, options),
            may,
        )
        _tell_late(talk)
        if found is not None:
            self._tell(talk, found, {})
            if found.objections:
                # Another assignment than the one that was replayed.
                binding.replayed_nats = None
            why = str(found) if not found.plans else "who proposed it decided nothing for this site"
            self.decisions.adopt(observed, found.plans, why)
        return found is not None

    def _pin(
        self, verdict: Verdict, own: Mapping[str, SitePlan], entries: Mapping[int, Entry]
    ) -> None:
        """What was agreed on, instead of the plan that was given: in every graph of these
        parameters, also in those that only infer and never talk."""
        if verdict.why:
            # No word from the others: what was given stays in force.
            return
        plans = verdict.plans or _all_high(own, str(verdict))
        # A site that they do not name is in high precision there.
        unnamed = {n: plan for n, plan in own.items() if n not in plans}
        common = Plan(sites={**plans, **_all_high(unnamed, "not in the plan of the others")})
        for site in self.source.sites:
            entry = entries.get(self.source.positions[site.weight]) if site.weight else None
            weight = None if entry is None else entry.ref()
            if entry is None or weight is None:
                continue
            found = common.find(shown_name(site, weight), site.k, site.n)
            if found is not None:
                entry.agreed[self.decisions.given, site.call] = found

    def _tell(self, talk: Agreement, verdict: Verdict, own: Mapping[str, SitePlan]) -> None:
        plans = verdict.plans
        differ = [n for n in plans if own.get(n, plans[n]) != plans[n]]
        differ += [n for n in own if plans and n not in plans]
        if differ and not verdict.objections:
            self.teller.say_once(
                "the plan given to this rank is not that of the others, which is used instead; "
                f"they differ at {', '.join(differ[:3])}" + (", ..." if len(differ) > 3 else "")
            )
        change = "" if talk.changeover is None else str(talk.changeover)
        said = "; ".join(filter(None, (str(verdict), change)))
        if verdict.why or verdict.missing or verdict.objections or verdict.late or change:
            self.teller.say_once(said)
        else:
            self.teller.report.note(said)


def _tell_late(talk: Agreement) -> None:
    """What cannot run here, said to all at once: nobody asked before they agreed on it."""
    failures, talk.unheard = talk.unheard, []
    demotion.give_up(failures)


def _all_high(plans: Mapping[str, SitePlan], why: str) -> dict[str, SitePlan]:
    return {
        name: replace(plan, directions={d: c.kept_high(why) for d, c in plan.directions.items()})
        for name, plan in plans.items()
    }
