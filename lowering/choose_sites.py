"""Choices of all sites at once: each direction's offers, and what couples them along a chain."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from typing import Protocol

import torch

from loka_compile.lowering.choose import Candidate
from loka_compile.lowering.choose import Offers
from loka_compile.lowering.choose import conclude
from loka_compile.lowering.choose import forced_choice
from loka_compile.lowering.choose import judge
from loka_compile.lowering.entries import Kernel
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.measure import Cost
from loka_compile.lowering.programme import Programme
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.select import candidates
from loka_compile.lowering.select import forced
from loka_compile.lowering.site_prices import SitePrices
from loka_compile.options import Options
from loka_compile.plan import Choice

Quantify = Callable[[str, str], Any]
#: Forward kernel -> its predicted loss in nats, or why that is not known.
Score = Callable[[str], "float | str"]
#: Stands in for times where nothing is timed and a budget asks what a site is worth.
_FLOPS_PER_US = 5e8


class Priced(Protocol):
    """What offers need of `SitePrices`."""

    def alone(self, direction: str, kernel: str) -> Cost | None: ...


def offers_of(
    name: str,
    shape: GemmShape,
    device: torch.device,
    options: Options,
    quantify: Quantify,
    prices: Priced | None,
    score: Score | None = None,
    directions: Sequence[str] = DIRECTIONS,
    unusable: Mapping[tuple[str, str], str] | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Offers]:
    """Direction -> Offers for one site. prices: None where nothing is timed, as in emulation.

    score: for gate="budget". It speaks of the forward alone: what a backward does to the loss shows
    only in later steps, and the gate of the local errors holds it. unusable: (direction, kernel) ->
    why it may not be chosen; such a kernel is not even run. dtype: in which the site computes.
    """
    fixed = forced(name, options)
    result: dict[str, Offers] = {}
    for direction in directions:
        if direction in fixed:
            choice = forced_choice(fixed[direction], direction, shape)
            result[direction] = Offers(fixed=choice)
            continue
        names, reasons = candidates(direction, shape, device, options, dtype)
        failed = {k: why for (d, k), why in (unusable or {}).items() if d == direction}
        names = [k for k in names if k not in failed]
        reasons = [*reasons, *(f"{k}: {why}" for k, why in failed.items())]
        high = None if prices is None or not names else prices.alone(direction, HIGH_PRECISION)
        found: list[Candidate] = []
        for kernel in names:
            cost = None if prices is None else prices.alone(direction, kernel)
            us, source, note = (None, "", "") if cost is None else (cost.us, cost.source, cost.note)
            found.append(Candidate(kernel, quantify(direction, kernel), us, source, note))
        high_us = high.us if high is not None else None
        one = judge(found, high_us, options, reasons, joint=True)
        result[direction] = _scored(one, score, options) if direction == "fwd" and score else one
    return result


def _scored(one: Offers, score: Score, options: Options) -> Offers:
    """`one` with the predicted loss of what passed; refused is what has none or costs too much."""
    passed: list[tuple[Candidate, float | None]] = []
    refused = list(one.refused)
    for candidate, speedup in one.passed:
        nats = score(candidate.kernel)
        if isinstance(nats, str):
            refused.append((candidate, f"no predicted loss: {nats}"))
        elif not nats <= options.loss_budget:
            why = f"predicted loss {nats:.2g} > the whole budget of {options.loss_budget:g} nats"
            refused.append((replace(candidate, score=nats), why))
        else:
            passed.append((replace(candidate, score=nats), speedup))
    return replace(one, passed=tuple(passed), refused=tuple(refused))


def choose_sites(
    offers: Mapping[str, Mapping[str, Offers]],
    producers: Mapping[str, str],
    options: Options,
    prices: Mapping[str, SitePrices],
    work: Mapping[str, float] | None = None,
    bounded: Mapping[str, str] | None = None,
) -> dict[str, dict[str, Choice]]:
    """Site -> direction -> Choice, over all sites at once.

    producers: site -> the site whose fused output is its input, and is read by nothing else; it
    stands before its reader in `offers`. prices: of the sites that have any. work: site -> FLOPs of
    its GEMM; under a loss budget they stand in for times that are not known. bounded: site -> the
    result of a norm that it reads, and may share with others.
    """
    budget = options.loss_budget if options.gate == "budget" else None
    programme = Programme(options.min_speedup)
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
        programme.add(site, kernels, own, producers.get(site), value, trains="wgrad" in per)
    outcomes = programme.solve(budget)
    return {
        site: {
            d: conclude(one, options, outcomes[site, d] if (site, d) in joint else None)
            for d, one in per.items()
        }
        for site, per in offers.items()
    }


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

    def saved(self, tensor: str, rules: Any) -> float:
        return 0.0
