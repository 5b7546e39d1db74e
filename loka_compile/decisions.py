"""What is decided about the sites of one graph for one set of parameters.

Decisions lie in the ledger, by parameter; here they are looked up (a given plan first), translated
into the kernels of a variant, and made from probe statistics.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from functools import cached_property
from functools import partial

from torch import Tensor

from loka_compile import demotion
from loka_compile import eligibility
from loka_compile import replay
from loka_compile.binding import Args
from loka_compile.binding import Binding
from loka_compile.capture import Source
from loka_compile.ledger import LEDGER
from loka_compile.ledger import Entry
from loka_compile.lowering.balance import StepTimes
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.select import why_high
from loka_compile.lowering.timing_budget import budget_of_capture
from loka_compile.names import Site
from loka_compile.names import layer_path
from loka_compile.names import registered_name
from loka_compile.options import Options
from loka_compile.passes.dispatch import Kernels
from loka_compile.plan import Plan
from loka_compile.plan import SitePlan
from loka_compile.probed_site import Probed
from loka_compile.probed_site import forced_plan
from loka_compile.probed_site import stay_high
from loka_compile.telling import Teller


def shown_name(site: Site, weight: Tensor | None) -> str:
    """The site's name for these parameters: equal blocks share a graph, not a name."""
    registered = registered_name(weight) if weight is not None else None
    if registered is None:
        return site.name
    return layer_path(registered) + (f"#{site.call}" if site.call else "")


@dataclass
class Observed:
    """Sites of one set of parameters that a decision is due for, by shown name."""

    binding: Binding
    probed: list[Probed] = field(default_factory=list)
    #: Those of them that were decided by being replaced.
    high: dict[str, SitePlan] = field(default_factory=dict)
    entries: dict[str, tuple[Entry, int]] = field(default_factory=dict)
    #: The graph's own name -> shown name.
    shown: dict[str, str] = field(default_factory=dict)
    #: What a step takes, where that may count.
    step: StepTimes | None = None


class Decisions:
    #: What a decision about a site is about.
    directions: Sequence[str] = DIRECTIONS

    def __init__(
        self,
        source: Source,
        options: Options,
        plan: Plan | None,
        eligible: frozenset[str],
        teller: Teller,
    ) -> None:
        self.source = source
        self.options = options
        self.plan = plan
        self.eligible = eligible
        self.teller = teller
        #: First site of a graph -> what its step takes, as its plan was made with; Probe state.
        self.steps: dict[str, StepTimes] = {}
        self._agreed: dict[str, Kernels] = {}
        self._timing = budget_of_capture()
        if plan is not None and plan.active:
            teller.pinned, teller.report.planned = True, frozenset(plan.sites)

    # -- looked up --------------------------------------------------------------------------------

    @property
    def pinned(self) -> bool:
        return self.plan is not None and self.plan.active

    @cached_property
    def given(self) -> str:
        """The hash of the plan that was given; empty without one."""
        return self.plan.digest() if self.plan is not None and self.plan.active else ""

    def planned_mods(self) -> tuple[str, ...] | None:
        """What the plan says of the Mods; None where it names nothing of this graph."""
        plan, sites = self.plan, self.source.sites
        if plan is None:
            return None
        layers = [s.name.partition("#")[0] for s in sites]
        found = plan.mods_of([*layers, *(j.name for j in self.source.judged)])
        if found is None and any(s.name in plan.sites for s in sites):
            # It lists the parameters for which Mods are on; these are not among them.
            found = () if plan.parameters else plan.mods
        if found is None and plan.active:
            self.teller.say_once("the plan names none of this graph's sites; it is not applied")
        return found

    def known(self, weights: Mapping[str, Tensor]) -> dict[str, SitePlan]:
        """Decisions that are in force: of the given plan by name and shape, else by identity."""
        found: dict[str, SitePlan] = {}
        for site in self.source.sites:
            weight = weights.get(site.name)
            if weight is None:
                continue
            entry = LEDGER.entry(weight)
            if (why := self._kept_out(site, shown_name(site, weight))) is not None:
                shown = replace(site, name=shown_name(site, weight))
                found[site.name] = entry.sites[site.call] = stay_high(shown, None, why)
                continue
            if self.plan is None or not self.plan.active:
                one = entry.sites.get(site.call)
            else:
                one = self._of_plan(self.plan, site, shown_name(site, weight))
                if entry.agreed:
                    one = entry.agreed.get((self.given, site.call), one)
            if one is None:
                shown = replace(site, name=shown_name(site, weight))
                one = forced_plan(shown, self.options)
            if one is not None:
                # Made when the model may have been of another dtype: `model.to` keeps parameters.
                one = replace(one, dtype=str(site.dtype).removeprefix("torch."))
                found[site.name] = entry.sites[site.call] = demotion.apply(one)
        return found

    def _kept_out(self, site: Site, name: str) -> str | None:
        """What the options say of a layer that shares the graph of another, `site`, by `name`."""
        options = self.options
        if name == site.name or eligibility.is_forced(replace(site, name=name), options):
            return None
        head = any(fnmatch.fnmatchcase(name, p) for p in options.heads or ())
        why = why_high(name, head, "", options, site.features)
        if why is None and site.name not in self.eligible:
            theirs = why_high(site.name, site.head, site.refusal, options, site.features)
            if theirs is not None:
                self.teller.say_once(
                    f"{name} shares its graph with {site.name} and runs in high precision with it: "
                    f"{theirs}"
                )
        return why

    def _of_plan(self, plan: Plan, site: Site, name: str) -> SitePlan | None:
        self.teller.report.met.add(name)
        one = plan.find(name, site.k, site.n)
        if one is None and name in plan.sites:
            old = plan.sites[name]
            self.teller.say_once(
                f"the plan decided {name} for K={old.K}, N={old.N}; here it is K={site.k}, "
                f"N={site.n}, so it runs in high precision"
            )
        return one

    # -- translated -------------------------------------------------------------------------------

    def kernels(self, site_plans: Mapping[str, SitePlan]) -> tuple[tuple[str, Kernels], ...]:
        chosen = []
        for site in self.source.sites:
            one = site_plans.get(site.name)
            if one is None or site.name not in self.eligible:
                continue
            fwd, dgrad, wgrad = (
                eligibility.runnable(kernel, self.source.device, self.options)
                for kernel in one.kernels
            )
            own: Kernels = (fwd, dgrad, wgrad)
            agreed = self._agreed.setdefault(site.name, own)
            if agreed != own:
                agreed = self._agree(site.name, agreed, own)
            if any(kernel != HIGH_PRECISION for kernel in agreed):
                chosen.append((site.name, agreed))
        return tuple(chosen)

    def _agree(self, name: str, a: Kernels, b: Kernels) -> Kernels:
        """Layers that share this graph differ: high precision where any of them needs it."""
        fwd, dgrad, wgrad = (
            one if one == other else HIGH_PRECISION for one, other in zip(a, b, strict=True)
        )
        if self._agreed[name] != (fwd, dgrad, wgrad):
            # The layers that were bound before follow in the next step, and not whenever something
            # else moves: other ranks run this program, and what moves differs between them.
            LEDGER.touch()
        self._agreed[name] = (fwd, dgrad, wgrad)
        self.teller.report.note(
            f"{name}: layers that share this graph chose different kernels; directions that "
            "differ run in high precision"
        )
        return self._agreed[name]

    def to_observe(self, site_plans: Mapping[str, SitePlan]) -> frozenset[str]:
        if not self.source.training or self.pinned:
            return frozenset()
        return frozenset(n for n in self.eligible if n not in site_plans)

    # -- made -------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Decisions moved: what layers of this graph agreed on is settled anew."""
        self._agreed.clear()

    def observed(self, binding: Binding, positions: list[int]) -> Observed:
        """What was probed of one set of parameters."""
        held = dict(zip(positions, binding.entries, strict=True))
        built = binding.built
        chains = dict(built.chains)
        found = Observed(binding)
        found.step = None if binding.meter is None else binding.meter.times()
        for site in self.source.sites:
            entry = held[self.source.positions[site.weight]] if site.weight else None
            weight = entry.ref() if entry is not None else None
            if site.name not in built.decided.observed or entry is None or weight is None:
                continue
            name = found.shown[site.name] = shown_name(site, weight)
            fused = built.fused.get(site.name)
            one = replace(site, name=name)
            found.entries[name] = entry, site.call
            if (site.call, "x") not in entry.statistics:
                found.high[name] = stay_high(one, fused, "replaced by a pattern")
                continue
            chain = chains.get(site.name)
            epilogue, producer = (chain.epilogue, chain.producer) if chain else ("", None)
            found.probed.append(
                Probed(
                    one, weight, entry.statistics, fused, epilogue, found.shown.get(producer or ""),
                    None if binding.scorer is None else partial(binding.scorer.nats, site.name),
                    self.directions, chain.stays if chain else "",
                    chain.bounded if chain else None,
                )
            )  # fmt: skip
        return found

    def propose(self, observed: Observed, args: Args | None) -> dict[str, SitePlan]:
        """Quantify every observed site, and decide over all of them.

        args: of a step whose rows no probe has seen, if there is one.
        """
        # Only here: a start with a pinned plan need not load it.
        from loka_compile import planner

        binding = observed.binding

        def failed(name: str, why: str) -> None:
            self.teller.say_once(f"{name} {why}")

        def replayed(plans: Mapping[str, SitePlan]) -> float | None:
            if binding.scorer is None or args is None:
                return None
            back = {site: plans[name] for site, name in observed.shown.items() if name in plans}
            return replay.replay(
                self.source,
                self.options,
                binding.built.decided.mods,
                back,
                args,
                binding.scorer.kinds,
            )

        note = self.teller.report.note
        step = observed.step
        if step is not None and observed.probed:
            note(step.sentence())
            # Those of graphs that these sites were in before are of no more use.
            for name in observed.shown.values():
                self.steps.pop(name, None)
            first = observed.probed[0].site
            self.steps[first.name] = replace(step, rows=first.m)
        decided, nats = planner.decide(
            observed.probed, self.options, failed, replayed, note, self._timing, step
        )
        if binding.scorer is not None:
            note(replay.sentence(decided, nats, self.options.loss_budget))
        binding.replayed_nats = nats
        return {**observed.high, **decided}

    def adopt(self, observed: Observed, plans: Mapping[str, SitePlan], why: str = "") -> None:
        """Put `plans` in force; a site that they do not name stays high, because of `why`."""
        sites = {p.site.name: p for p in observed.probed}
        for name, (entry, call) in observed.entries.items():
            plan = plans.get(name)
            if plan is None:
                one = sites.get(name)
                plan = stay_high(one.site, one.fused, why) if one else observed.high[name]
            self.record(entry, call, plan, observed.binding.replayed_nats)
        # The rows it holds are of no more use.
        observed.binding.scorer = None

    def record(self, entry: Entry, call: int, plan: SitePlan, nats: float | None) -> None:
        entry.sites[call] = plan
        entry.emulated = self.options.emulate
        entry.replayed_nats = nats
