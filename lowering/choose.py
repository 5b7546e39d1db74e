"""The choice: the fastest kernel that is accurate enough, of one direction."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

from loka_compile.lowering import gate
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.programme import Outcome
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.options import Options
from loka_compile.plan import Choice

#: Without times, a kernel is taken over a more accurate one when its error is within this factor:
#: differences below it are sampling noise, and the order of the libraries decides.
AS_GOOD = 1.1


@dataclass(frozen=True)
class Candidate:
    """A kernel at one direction of one site. `source` and `note`: as in `measure.Cost`.

    us: on its own, as if no other direction and no neighbour were in FP8. score: its share of the
    loss budget. errors: None while nobody has measured them.
    """

    kernel: str
    errors: Any
    us: float | None
    source: str = "measured"
    note: str = ""
    score: float = 0.0


@dataclass(frozen=True)
class Offers:
    """What one direction of one site may take: what passed, what was refused and why.

    `fixed` is the choice where there is nothing to choose: forced, or no candidate at all.
    """

    high_us: float | None = None
    passed: tuple[tuple[Candidate, float | None], ...] = ()
    refused: tuple[tuple[Candidate, str], ...] = ()
    fixed: Choice | None = None

    @property
    def timed(self) -> bool:
        return self.high_us is not None and all(one.us is not None for one, _ in self.passed)


def judge(
    found: Iterable[Candidate],
    high_us: float | None,
    options: Options,
    reasons: Iterable[str],
    joint: bool = False,
) -> Offers:
    """Let `found` through the accuracy gate and the speed gate.

    joint: what a kernel gains is judged later, together with what it shares; here it needs a price.
    """
    refused: list[tuple[Candidate, str]] = []
    passed: list[tuple[Candidate, float | None]] = []
    for one in found:
        why = None
        if one.errors is not None:
            why = gate.why_refused(one.errors, options.gate, options.max_mere)
        speedup = high_us / one.us if one.us and high_us else None
        if why is None and not options.emulate and options.min_speedup > 0:
            if one.source == "failed":
                why = f"failed when timed ({one.note})"
            elif speedup is None:
                why = f"not timed (tune={options.tune!r}); min_speedup=0 takes it untimed"
            elif speedup < options.min_speedup and not joint:
                why = _too_slow(speedup, options)
        if why is None:
            passed.append((one, speedup))
        else:
            refused.append((one, why))
    if not passed and not refused:
        why = "; ".join(reasons) or "no kernel offers this"
        return Offers(high_us, fixed=Choice(reason=why))
    return Offers(high_us, tuple(passed), tuple(refused))


def conclude(offers: Offers, options: Options, outcome: Outcome | None = None) -> Choice:
    """The choice out of `offers`: what `outcome` says, else the best on its own."""
    if offers.fixed is not None:
        return offers.fixed
    if outcome is not None:
        return _concluded(offers, options, outcome)
    if offers.passed:
        one, speedup = _best(list(offers.passed))
        source = "emulated" if options.emulate else (one.source if one.us else "untimed")
        return _choice(one, speedup, source)
    one, why = min(offers.refused, key=lambda refused: _clamped(refused[0]))
    high_us = offers.high_us
    return _stays_high(one, high_us / one.us if one.us and high_us else None, why)


def _concluded(offers: Offers, options: Options, outcome: Outcome) -> Choice:
    """As the programme over all sites found it, with the numbers that it compared."""
    by_name = {c.kernel: c for c, _ in offers.passed}
    scored = options.gate == "budget" and any(c.score for c in by_name.values())
    if outcome.kernel != HIGH_PRECISION:
        one = by_name[outcome.kernel]
        us = outcome.us if offers.timed else None
        speedup = outcome.high_us / us if us else None
        source = outcome.source if us else "emulated" if options.emulate else "untimed"
        choice = _choice(replace(one, us=us), speedup, source)
        if speedup is not None and speedup < options.min_speedup:
            gains = "its chain, or the host," if outcome.for_host else "its chain"
            choice = replace(choice, reason=f"speedup {speedup:.2f}, but {gains} gains by it")
        return replace(choice, nats=one.score) if scored else choice
    best = by_name[outcome.best]
    us = outcome.best_us if offers.timed else None
    speedup = outcome.high_us / us if us else None
    if speedup is not None and speedup < options.min_speedup:
        return _stays_high(replace(best, us=us), speedup, _too_slow(speedup, options))
    if speedup is not None and (outcome.gain or speedup) < options.min_speedup:
        why = f"speedup {speedup:.2f}, but it costs the host more, for which the step waits"
        return _stays_high(replace(best, us=us), speedup, why)
    if scored:
        least = min(by_name.values(), key=lambda c: c.score)
        why = (
            f"predicted loss {least.score:.2g} nats, and the budget of {options.loss_budget:g} is "
            "spent elsewhere"
        )
        return replace(_stays_high(least, None, why), nats=least.score)
    return _stays_high(replace(best, us=us), speedup, "its chain is faster without it")


def _too_slow(speedup: float, options: Options) -> str:
    return f"speedup {speedup:.2f} < {options.min_speedup:g}"


def _stays_high(one: Candidate, speedup: float | None, why: str) -> Choice:
    return replace(
        _choice(one, speedup, ""),
        kernel=HIGH_PRECISION,
        library="torch",
        recipe=HIGH_PRECISION,
        reason=f"{one.kernel}: {why}",
    )


def choose(
    found: Iterable[Candidate], high_us: float | None, options: Options, reasons: Iterable[str]
) -> Choice:
    """Pick from the candidates of one direction, on its own."""
    return conclude(judge(found, high_us, options, reasons), options)


def _best(passed: list[tuple[Candidate, float | None]]) -> tuple[Candidate, float | None]:
    if all(one.us is not None for one, _ in passed):
        return min(passed, key=lambda p: p[0].us or 0.0)
    least = min(one.errors.mere_clamped for one, _ in passed)
    return next(p for p in passed if p[0].errors.mere_clamped <= AS_GOOD * least)


def _clamped(one: Candidate) -> float:
    return math.inf if one.errors is None else float(one.errors.mere_clamped)


def _number(value: float | None) -> float | None:
    """JSON has no inf and no NaN; the reason says in words what was wrong."""
    return value if value is not None and math.isfinite(value) else None


def _choice(one: Candidate, speedup: float | None, source: str) -> Choice:
    library, recipe, _ = split_kernel_name(one.kernel)
    return Choice(
        kernel=one.kernel,
        library=library.name,
        recipe=recipe,
        mere=_number(getattr(one.errors, "mere", None)),
        mere_clamped=_number(getattr(one.errors, "mere_clamped", None)),
        bad_rows=_number(getattr(one.errors, "bad_rows", None)),
        us=one.us,
        speedup=speedup,
        source=source,
    )


def forced_choice(kernel: str, direction: str, shape: GemmShape) -> Choice:
    """No measurement stands against the user's word, but a shape that cannot run does."""
    if kernel == HIGH_PRECISION:
        return Choice(source="forced", reason="forced by option")
    library, recipe, _ = split_kernel_name(kernel)
    why = library.why_not(recipe, direction, shape)
    if why is not None:
        return Choice(source="forced", reason=f"forced {kernel}: {why}")
    return Choice(
        kernel=kernel,
        library=library.name,
        recipe=recipe,
        source="forced",
        reason="forced by option",
    )
