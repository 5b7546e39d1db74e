"""The plans of one graph as its rank agrees on them with the others (`agreement.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from loka_compile import agreement
from loka_compile import eligibility
from loka_compile.agreement import Agreement
from loka_compile.agreement import Verdict
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
from loka_compile.variants import Built


class Peers:
    def __init__(
        self, source: Source, options: Options, decisions: Decisions, teller: Teller
    ) -> None:
        self.source = source
        self.options = options
        self.decisions = decisions
        self.teller = teller

    def join(
        self, built: Built, weights: Mapping[str, Tensor], site_plans: Mapping[str, SitePlan]
    ) -> Agreement | None:
        """The talk that a plan for these weights is subject to; None without other ranks.

        None also where there is nothing to talk about: no gradients, or decided already.
        """
        if not self.source.training or not weights or agreement.world() is None:
            return None
        eligible = self.decisions.eligible
        open_question = site_plans if self.decisions.pinned else built.decided.observed
        if eligible and not open_question:
            return None
        sites = [(shown_name(s, weights.get(s.name)), s.k, s.n) for s in self.source.sites]
        first = next(iter(weights.values()))
        talk = agreement.about(sites, LEDGER.entry(first).agreements, self.decisions.given)
        if talk is None or talk.settled:
            return None
        if not eligible:
            talk.refuse(eligibility.why_none(self.source.sites, self.source.device, self.options))
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
        # A plan that was given is there at the first call, when others may still compile and have
        # not joined: nobody would ask them. Collectives of the program hold later calls back.
        waits = binding.pending or talk.clock <= PROBE_STEPS if pinned else not binding.ready
        if waits:
            return False
        facts = f"the Mods {binding.decision.mods.text(99)}"
        device, options = self.source.device, self.options
        if pinned:
            own = {p.name: p for p in binding.site_plans.values()}
            verdict = talk.poll(
                facts, lambda: own, lambda plans: objections.to_plan(plans, None, device, options)
            )
            if verdict is not None:
                self._tell(verdict, own)
                self._pin(verdict, own, dict(zip(positions, binding.entries, strict=True)))
            return verdict is not None
        observed = self.decisions.observed(binding, positions)
        probed = {p.site.name: p for p in observed.probed}
        verdict = talk.poll(
            facts,
            lambda: self.decisions.propose(observed, args),
            lambda plans: objections.to_plan(plans, probed, device, options),
        )
        if verdict is not None:
            self._tell(verdict, {})
            if verdict.objections:
                # Another assignment than the one that was replayed.
                binding.replayed_nats = None
            why = str(verdict) if not verdict.plans else "rank 0 decided nothing for this site"
            self.decisions.adopt(observed, verdict.plans, why)
        return verdict is not None

    def _pin(
        self, verdict: Verdict, own: Mapping[str, SitePlan], entries: Mapping[int, Entry]
    ) -> None:
        """What was agreed on, instead of the plan that was given: in every graph of these
        parameters, also in those that only infer and never talk."""
        if verdict.why:
            # No word from the others: what was given stays in force.
            return
        plans = verdict.plans or {
            name: replace(
                plan,
                directions={d: c.kept_high(str(verdict)) for d, c in plan.directions.items()},
            )
            for name, plan in own.items()
        }
        common = Plan(sites=plans)
        for site in self.source.sites:
            entry = entries.get(self.source.positions[site.weight]) if site.weight else None
            weight = None if entry is None else entry.ref()
            if entry is None or weight is None:
                continue
            found = common.find(shown_name(site, weight), site.k, site.n)
            if found is not None:
                entry.agreed[self.decisions.given, site.call] = found

    def _tell(self, verdict: Verdict, own: Mapping[str, SitePlan]) -> None:
        differ = [n for n, plan in verdict.plans.items() if own.get(n, plan) != plan]
        if differ and not verdict.objections:
            self.teller.say_once(
                "the plan given to this rank is not that of the others, which is used instead; "
                f"they differ at {', '.join(differ[:3])}" + (", ..." if len(differ) > 3 else "")
            )
        if verdict.why or verdict.missing or verdict.objections:
            self.teller.say_once(str(verdict))
        else:
            self.teller.report.note(str(verdict))
