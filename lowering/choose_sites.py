"""Choices of all sites at once: each direction's offers, and what couples them along a chain."""

from __future__ import annotations

import math
from collections.abc import Hashable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from loka_compile.lowering.balance import StepTimes
from loka_compile.lowering.balance import balanced
from loka_compile.lowering.choose import Offers
from loka_compile.lowering.choose import conclude
from loka_compile.lowering.contest import Quantify
from loka_compile.lowering.contest import offers_of
from loka_compile.lowering.entries import Kernel
from loka_compile.lowering.entries import Outcome
from loka_compile.lowering.entries import Slot
from loka_compile.lowering.groups import Member
from loka_compile.lowering.groups import groups
from loka_compile.lowering.groups import question
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.measure import Cost
from loka_compile.lowering.programme import Programme
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.site_prices import SitePrices
from loka_compile.options import Options
from loka_compile.plan import Choice

#: Stands in for times where nothing is timed and a budget asks what a site is worth.
_FLOPS_PER_US = 5e8
#: Share (`balance.py`), what a group of sites is (`groups.question`) -> direction -> outcome, of
#: each of its sites.
Answers = dict[Hashable, list[dict[str, Outcome]]]


@dataclass(frozen=True)
class Found:
    """What the programme over all sites found; `joint`: the slots whose choice is its own."""

    outcomes: Mapping[Slot, Outcome]
    joint: frozenset[Slot]
    #: Microseconds of the device and of the host at all other sites.
    rest: tuple[float, float] = (0.0, 0.0)
    #: And in all that is no linear.
    whole_step: bool = False

    def choices(
        self, offers: Mapping[str, Mapping[str, Offers]], options: Options
    ) -> dict[str, dict[str, Choice]]:
        mine = {slot: self.outcomes[slot] for slot in self.joint}
        return {
            site: {d: conclude(one, options, mine.get((site, d))) for d, one in per.items()}
            for site, per in offers.items()
        }

    def waits_for_host(self) -> str | None:
        """A sentence for the report where the host decided, or needs longer than the device."""
        device, host = _totals(self.outcomes, self.rest)
        if host <= device and not any(one.for_host for one in self.outcomes.values()):
            return None
        what = "all of this graph" if self.whole_step else "linears alone"
        return (
            f"the host needs {host / 1e3:.2f} ms to start what the device does in "
            f"{device / 1e3:.2f} ms ({what}, forward and backward), and counts in the "
            'choice of kernels. With options={"mode": "reduce-overhead"} CUDA graphs start them'
        )


def choose_sites(
    offers: Mapping[str, Mapping[str, Offers]],
    producers: Mapping[str, str],
    options: Options,
    prices: Mapping[str, SitePrices],
    work: Mapping[str, float] | None = None,
    bounded: Mapping[str, str] | None = None,
) -> dict[str, dict[str, Choice]]:
    """Site -> direction -> Choice, over all sites at once; see `find`."""
    found = find(offers, producers, options, prices, work, bounded)
    return found.choices(offers, options)


def find(
    offers: Mapping[str, Mapping[str, Offers]],
    producers: Mapping[str, str],
    options: Options,
    prices: Mapping[str, SitePrices],
    work: Mapping[str, float] | None = None,
    bounded: Mapping[str, str] | None = None,
    answers: Answers | None = None,
    step: StepTimes | None = None,
) -> Found:
    """The best choice over all sites at once.

    producers: site -> the site whose fused output is its input, and is read by nothing else; it
    stands before its reader in `offers`. prices: of the sites that have any. work: site -> FLOPs of
    its GEMM; under a loss budget they stand in for times that are not known. bounded: site -> the
    result of a norm that it reads, and may share with others. answers: of groups of sites, kept for
    later calls: equal blocks of a model, whose prices are the same objects, are solved once. step:
    what all of a step takes in high precision.
    """
    budget = options.loss_budget if options.gate == "budget" else None
    members: list[Member] = []
    joint: set[tuple[str, str]] = set()
    for site, per in offers.items():
        own: Any = prices.get(site)
        timed = own is not None and any(map(_programmable, per.values()))
        if budget is not None and not timed and "fwd" in per and _has_choice(per["fwd"]):
            own = _Worth((work or {}).get(site, 1.0), per["fwd"])
            joint.add((site, "fwd"))
        elif timed:
            joint.update((site, d) for d, one in per.items() if _programmable(one))
        else:
            continue
        kernels = {d: _kernels(per.get(d), (site, d) in joint, options) for d in DIRECTIONS}
        value = (bounded or {}).get(site)
        members.append(Member(site, kernels, own, producers.get(site), value, "wgrad" in per))
    kept: Answers = {} if answers is None else answers
    decided = {one.name for one in members}
    others = {s: per for s, per in offers.items() if s not in decided} if members else {}
    rest = _rest(others, prices, options)
    whole = bool(members) and step is not None and step.waits_for_host
    if step is not None and whole:
        high = _high(offers, prices)
        beside = max(step.device - high[0], 0.0), max(step.host - high[1], 0.0)
        rest = rest[0] + beside[0], rest[1] + beside[1]

    def solve(share: float) -> dict[Slot, Outcome]:
        return _solve(members, options, budget, kept, share)

    def between(one: _Outcomes, other: _Outcomes) -> Iterator[_Outcomes]:
        # A budget couples all.
        return iter(()) if budget is not None else _between(members, one, other)

    outcomes = balanced(solve, lambda found: _totals(found, rest), between)
    return Found(outcomes, frozenset(joint), rest, whole)


_Outcomes = dict[Slot, Outcome]


def _high(
    offers: Mapping[str, Mapping[str, Offers]], prices: Mapping[str, SitePrices]
) -> tuple[float, float]:
    """Microseconds of the device and of the host where every linear is in high precision."""
    costs = [
        prices[site].alone(direction, HIGH_PRECISION)
        for site, per in offers.items()
        for direction in (per if site in prices else ())
    ]
    known = [cost for cost in costs if cost is not None and cost.us is not None]
    return math.fsum(c.us or 0.0 for c in known), math.fsum(c.host for c in known)


def _rest(
    offers: Mapping[str, Mapping[str, Offers]],
    prices: Mapping[str, SitePrices],
    options: Options,
) -> tuple[float, float]:
    """Microseconds of the device and of the host at sites where nothing is chosen jointly."""
    costs = []
    for site, per in offers.items():
        for direction, one in per.items() if site in prices else ():
            kernel = HIGH_PRECISION if _has_choice(one) else conclude(one, options).kernel
            cost = prices[site].alone(direction, kernel)
            if cost is not None and cost.us is not None:
                costs.append((cost.us, cost.host))
    return math.fsum(us for us, _ in costs), math.fsum(host for _, host in costs)


def _totals(
    outcomes: Mapping[Slot, Outcome], rest: tuple[float, float] = (0.0, 0.0)
) -> tuple[float, float]:
    """Microseconds of the device and of the host."""
    device = math.fsum(one.us for one in outcomes.values())
    return device + rest[0], math.fsum(one.host for one in outcomes.values()) + rest[1]


def _between(members: list[Member], one: _Outcomes, other: _Outcomes) -> Iterator[_Outcomes]:
    """`one`, with one group after the other as `other` has it."""
    found = dict(one)
    for group in groups(members):
        found = {**found, **{(m.name, d): other[m.name, d] for m in group for d in DIRECTIONS}}
        yield found


def _solve(
    members: list[Member], options: Options, budget: float | None, answers: Answers, share: float
) -> dict[Slot, Outcome]:
    found: dict[Slot, Outcome] = {}
    # A budget couples all.
    for group in groups(members) if budget is None else [members]:
        asked = None if budget is not None else (share, question(group))
        answer = None if asked is None else answers.get(asked)
        if answer is None:
            programme = Programme(options.min_speedup, share)
            for one in group:
                programme.add(
                    one.name, one.kernels, one.prices, one.producer, one.bounded, one.trains
                )
            outcomes = programme.solve(budget)
            answer = [{d: outcomes[one.name, d] for d in DIRECTIONS} for one in group]
            if asked is not None:
                answers[asked] = answer
        for one, per in zip(group, answer, strict=True):
            found.update(((one.name, d), outcome) for d, outcome in per.items())
    return found


def choose_site(
    name: str,
    shape: GemmShape,
    device: torch.device,
    options: Options,
    quantify: Quantify,
    prices: SitePrices | None,
) -> dict[str, Choice]:
    """Direction -> Choice for one site without neighbours."""
    offers = {name: offers_of(name, shape, device, options, quantify, prices)}
    return choose_sites(offers, {}, options, {} if prices is None else {name: prices})[name]


def _kernels(one: Offers | None, joint: bool, options: Options) -> list[Kernel]:
    """What may run there: one kernel where there is nothing to choose."""
    if one is None:
        return [Kernel(HIGH_PRECISION)]
    if not joint:
        return [Kernel(conclude(one, options).kernel)]
    passed = (Kernel(c.kernel, max(c.score, 0.0)) for c, _ in one.passed)
    return [Kernel(HIGH_PRECISION), *passed]


def _has_choice(one: Offers) -> bool:
    return one.fixed is None and bool(one.passed)


def _programmable(one: Offers) -> bool:
    """Something to choose from, all of it with a price."""
    return _has_choice(one) and one.timed


class _Worth:
    """Stands in for prices: what a forward is worth by its FLOPs. FP8 counts half of high
    precision, and of two kernels the more accurate one is a bit less."""

    def __init__(self, flops: float, offers: Offers) -> None:
        self.us = flops / _FLOPS_PER_US
        self.errors = {c.kernel: c.errors.mere_clamped for c, _ in offers.passed}

    def fwd(self, kernel: str, handed: bool = False) -> Cost | None:
        if handed:
            return None
        part = 1.0 if kernel == HIGH_PRECISION else 0.5 + 1e-3 * self.errors[kernel]
        return Cost(self.us * part, "")

    def back(self, *_: Any, **__: Any) -> Cost | None:
        return None

    def gradient(self, rules: Any) -> Cost | None:
        return None

    def bounded(self, turned: bool) -> Cost | None:
        return None

    def saved(self, tensor: str, rules: Any) -> Cost:
        return Cost(0.0, "")
