"""What the user is told about one graph: the report's rows, the loud lines, the dumps."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from collections.abc import Mapping

from loka_compile import mods
from loka_compile import planner
from loka_compile import variant
from loka_compile.capture import Source
from loka_compile.options import Environment
from loka_compile.options import Options
from loka_compile.plan import SitePlan
from loka_compile.report import collect
from loka_compile.report import dump
from loka_compile.variants import Built

log = logging.getLogger("loka_compile")


class Teller:
    def __init__(
        self, source: Source, options: Options, environment: Environment, eligible: frozenset[str]
    ) -> None:
        self.source = source
        self.options = options
        self.environment = environment
        self.eligible = eligible
        self.report = collect.GraphReport(
            label=source.label(), prepared=list(source.records), environment=environment
        )
        self._said: set[str] = set()

    def say_once(self, what: str) -> None:
        """At WARNING and in the report."""
        if what not in self._said:
            self._said.add(what)
            self.report.note(what)
            log.warning("loka: %s: %s", self.source.label(), what)

    def bound(
        self,
        built: Built,
        decision: mods.Decision,
        site_plans: Mapping[str, SitePlan],
        weights: Hashable,
    ) -> None:
        """A variant came into force for a set of parameters, `weights` standing for them."""
        source, options = self.source, self.options
        collect.seen(self.report)
        self.report.update(
            planner.table(
                source.sites,
                site_plans,
                built.fused,
                self.eligible,
                source.device,
                options,
                source.training,
            ),
            built.records,
            built.decided.label(),
            decision,
            lambda: variant.replay(source, built.decided, options),
        )
        planned = [s for s in site_plans.values() if any(c.is_fp8 for c in s.directions.values())]
        if planned and not built.decided.kernels:
            why = sorted(
                {c["reason"] for row in self.report.sites for c in row["directions"].values()}
            )
            self.say_once(f"the plan's FP8 kernels do not run here: {'; '.join(filter(None, why))}")
        # Keyed by weights, not by graph: train, eval and dynamic graphs of one model say it once.
        if built.decided.mods:
            counts = self.report.change_counts()
            collect.say_once(("on", weights), mods.say_changes, source.label(), counts, decision)
        elif options.mods == "auto" and not decision.quiet and "off" not in self._said:
            self._said.add("off")
            left = planner.left_alone(source, options)
            collect.say_once(("off", weights), mods.say_left_alone, source.label(), left, decision)
        dump.emit(self.report, self.environment)
