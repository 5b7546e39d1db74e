"""Choices of all sites at once: each direction's offers, and what couples them along a chain."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from loka_compile.lowering import assign
from loka_compile.lowering.assign import Option
from loka_compile.lowering.choose import HIGH
from loka_compile.lowering.choose import Candidate
from loka_compile.lowering.choose import Offers
from loka_compile.lowering.choose import conclude
from loka_compile.lowering.choose import forced_choice
from loka_compile.lowering.choose import judge
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.measure import Cost
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import E4M3
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.select import candidates
from loka_compile.lowering.select import forced
from loka_compile.options import Options
from loka_compile.plan import Choice

Quantify = Callable[[str, str], Any]
#: (direction, kernel, handed) -> its cost, None where it is not known.
Price = Callable[[str, str, bool], Cost | None]
#: Forward kernel -> its predicted loss in nats, or why that is not known.
Score = Callable[[str], "float | str"]
#: Stands in for times where nothing is timed and a budget asks what a site is worth.
_FLOPS_PER_US = 5e8


def offers_of(
    name: str,
    shape: GemmShape,
    device: torch.device,
    options: Options,
    quantify: Quantify,
    price: Price,
    handed: bool = False,
    score: Score | None = None,
    directions: Sequence[str] = DIRECTIONS,
) -> dict[str, Offers]:
    """Direction -> Offers for one site. handed: its producer could hand over an e4m3 input.

    score: for gate="budget". It speaks of the forward alone: what a backward does to the loss shows
    only in later steps, and the gate of the local errors holds it.
    """
    fixed = forced(name, options)
    result: dict[str, Offers] = {}
    for direction in directions:
        if direction in fixed:
            choice = forced_choice(fixed[direction], direction, shape)
            result[direction] = Offers(fixed=choice)
            continue
        names, reasons = candidates(direction, shape, device, options)
        high = None if options.emulate or not names else price(direction, HIGH_PRECISION, False)
        found: list[Candidate] = []
        for kernel in names:
            errors = quantify(direction, kernel)
            found.append(_candidate(kernel, errors, direction, options, price, False))
            if handed and takes_e4m3(kernel, direction) and not options.emulate:
                found.append(_candidate(kernel, errors, direction, options, price, True))
        one = judge(found, high.us if high is not None else None, options, reasons)
        result[direction] = _scored(one, score, options) if direction == "fwd" and score else one
    return result


def _scored(one: Offers, score: Score, options: Options) -> Offers:
    """`one` with the predicted loss of what passed; refused is what has none or costs too much."""
    passed: list[tuple[Candidate, float | None]] = []
    refused = list(one.refused)
    known: dict[str, float | str] = {}
    for candidate, speedup in one.passed:
        kernel = candidate.kernel
        if kernel not in known:
            known[kernel] = score(kernel)
        nats = known[kernel]
        if isinstance(nats, str):
            refused.append((candidate, f"no predicted loss: {nats}"))
        elif not nats <= options.loss_budget:
            why = f"predicted loss {nats:.2g} > the whole budget of {options.loss_budget:g} nats"
            refused.append((replace(candidate, score=nats), why))
        else:
            passed.append((replace(candidate, score=nats), speedup))
    return replace(one, passed=tuple(passed), refused=tuple(refused))


def _candidate(
    kernel: str, errors: Any, direction: str, options: Options, price: Price, handed: bool
) -> Candidate:
    cost = None if options.emulate else price(direction, kernel, handed)
    if cost is None:
        return Candidate(kernel, errors, None, "", handed=handed)
    return Candidate(kernel, errors, cost.us, cost.source, cost.note, handed)


def hands_over(kernel: str) -> bool:
    """Can this forward kernel write its chain's output as e4m3 with a static scale."""
    library, _, _ = split_kernel_name(kernel)
    return library.hands_over


def takes_e4m3(kernel: str, direction: str) -> bool:
    """Can this kernel read the site's input as e4m3 with one scale: forward, or wgrad's transpose.

    Scales along the contraction are not what one static scale can stand for.
    """
    if direction == "dgrad":
        return False
    library, recipe, _ = split_kernel_name(kernel)
    rule = library.recipes[recipe].gemm(direction)
    if rule is None:
        return False
    operand = rule.a if direction == "fwd" else rule.b
    return operand.dtype == E4M3 and not operand.blocks


def choose_site(
    name: str,
    shape: GemmShape,
    device: torch.device,
    options: Options,
    quantify: Quantify,
    price: Price,
) -> dict[str, Choice]:
    """Direction -> Choice for one site on its own. `choose_sites` sees its neighbours too."""
    offers = offers_of(name, shape, device, options, quantify, price)
    return {d: conclude(one, options) for d, one in offers.items()}


def choose_sites(
    offers: Mapping[str, Mapping[str, Offers]],
    producers: Mapping[str, str],
    options: Options,
    work: Mapping[str, float] | None = None,
) -> dict[str, dict[str, Choice]]:
    """Site -> direction -> Choice, over all sites at once.

    producers: site -> the site whose fused output is its input, and is read by nothing else. work:
    site -> FLOPs of its GEMM; under a loss budget they stand in for times that are not known.
    """
    budget = options.loss_budget if options.gate == "budget" else None
    slots = [
        (s, d)
        for s, per in offers.items()
        for d, one in per.items()
        if _programmable(one, bounded=budget is not None and d == "fwd")
    ]
    at = {slot: i for i, slot in enumerate(slots)}
    taken: list[list[Candidate]] = []
    programme: list[list[Option]] = []
    for site, direction in slots:
        one = offers[site][direction]
        us = _times(one, (work or {}).get(site, 1.0))
        own, priced = [HIGH], [Option(us[HIGH.kernel, False])]
        for candidate, _ in one.passed:
            needs = None
            if candidate.handed:
                producer = at.get((producers.get(site, ""), "fwd"))
                if producer is None or producer >= len(taken):
                    continue
                able = (i for i, c in enumerate(taken[producer]) if c is not HIGH)
                needs = (
                    producer,
                    frozenset(i for i in able if hands_over(taken[producer][i].kernel)),
                )
            own.append(candidate)
            price = us[candidate.kernel, candidate.handed]
            priced.append(Option(price, max(candidate.score, 0.0), needs))
        taken.append(own)
        programme.append(priced)
    picked = dict(zip(slots, assign.solve(programme, budget), strict=True))
    return {
        site: {
            d: _concluded(one, options, taken[at[site, d]][picked[site, d]])
            if (site, d) in at
            else conclude(one, options)
            for d, one in per.items()
        }
        for site, per in offers.items()
    }


def _concluded(one: Offers, options: Options, taken: Candidate) -> Choice:
    choice = conclude(one, options, taken)
    if options.gate != "budget":
        return choice
    if taken is not HIGH:
        return replace(choice, nats=taken.score)
    least = min((c for c, _ in one.passed), key=lambda c: c.score)
    why = (
        f"{least.kernel}: predicted loss {least.score:.2g} nats, and the budget of "
        f"{options.loss_budget:g} is spent elsewhere"
    )
    return replace(choice, reason=why, nats=least.score)


def _times(one: Offers, flops: float) -> dict[tuple[str, bool], float]:
    """(kernel, handed) -> us of what passed and of high precision; from FLOPs where untimed.

    FP8 counts half of high precision then, and of two kernels the more accurate one is a bit less.
    """
    found = {(c.kernel, c.handed): c.us for c, _ in one.passed}
    if one.timed and one.high_us is not None:
        return {(HIGH.kernel, False): one.high_us, **{k: us or 0.0 for k, us in found.items()}}
    us = flops / _FLOPS_PER_US
    errors = {(c.kernel, c.handed): c.errors.mere_clamped for c, _ in one.passed}
    return {(HIGH.kernel, False): us, **{k: us * (0.5 + 1e-3 * e) for k, e in errors.items()}}


def _programmable(one: Offers, *, bounded: bool) -> bool:
    """Something to choose from, all of it with a price (or with a loss, where that is bounded)."""
    return one.fixed is None and bool(one.passed) and (one.timed or bounded)
