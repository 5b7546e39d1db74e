"""What the user is told about one graph: the report's rows, the loud lines, the dumps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence

from loka_compile import mods
from loka_compile import site_tables
from loka_compile import variant
from loka_compile.capture import Source
from loka_compile.ledger import Entry
from loka_compile.mod_set import ModSet
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
            label=source.label(),
            prepared=list(source.records),
            environment=environment,
            device=str(source.device),
        )
        #: A plan was given, and nothing but it decides.
        self.pinned = False
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
        entries: Sequence[Entry],
        wanted: ModSet,
        refused: str = "",
    ) -> None:
        """A variant came into force for a set of weights, `entries` standing for them.

        wanted: the Mods that would be on if "auto" had found the model fresh.
        refused: why nothing of what was decided for FP8 runs here, if so.
        """
        source, options, decided = self.source, self.options, built.decided
        planned = any(c.is_low for s in site_plans.values() for c in s.directions.values())
        if refused:
            site_plans = {name: one.in_high_precision(refused) for name, one in site_plans.items()}
        collect.seen(self.report)
        self.report.update(
            site_tables.table(
                source.sites,
                {n: one.without_forward(built.unfit.get(n)) for n, one in site_plans.items()},
                built.fused,
                self.eligible,
                source.device,
                options,
                source.training,
                self.pinned,
            ),
            built.records,
            decided.label(),
            decision,
            lambda: variant.replay(source, decided, options),
        )
        if planned and not decided.kernels:
            given = [c["reason"] for row in self.report.sites for c in row["directions"].values()]
            why = refused or "; ".join(sorted({*filter(None, given)})) or "no site gives a reason"
            self.say_once(f"the plan's FP8 kernels do not run here: {why}")
        users = {p.name for p in options.patterns}
        theirs = self.report.change_counts(users.__contains__)
        # By weights, not by graph: train, eval and dynamic graphs of one model say it once.
        if theirs and _first_time(f"patterns {sorted(theirs)}", entries):
            say_patterns(source.label(), theirs)
        if decided.mods:
            if _first_time(f"on {decision.mods.text(99)}", entries):
                counts = self.report.change_counts(lambda name: name not in users)
                mods.say_changes(source.label(), counts, decision)
        elif options.mods == "auto" and not decision.quiet and "off" not in self._said:
            self._said.add("off")
            if _first_time("off", entries):
                left = site_tables.left_alone(source, options, wanted)
                mods.say_left_alone(source.label(), left, decision)
        dump.emit(self.report, self.environment)


def say_patterns(where: str, counts: Mapping[str, int]) -> None:
    """The one loud line about patterns that do not promise to keep the function."""
    listed = ", ".join(f"{n} x {what}" for what, n in sorted(counts.items()))
    log.warning(
        "loka: patterns changed the function of %s, with Mods on or off: %s. If a pattern computes "
        "the same, say preserves=True and let loka_compile.check_pattern prove it",
        where,
        listed,
    )


def _first_time(what: str, entries: Sequence[Entry]) -> bool:
    new = [e for e in entries if what not in e.said]
    for entry in new:
        entry.said.add(what)
    return bool(new)
