"""Choices of all sites at once: each direction's offers, and what couples them along a chain."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
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


def offers_of(
    name: str,
    shape: GemmShape,
    device: torch.device,
    options: Options,
    quantify: Quantify,
    price: Price,
    handed: bool = False,
    unusable: Mapping[tuple[str, str], str] | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Offers]:
    """Direction -> Offers for one site. handed: its producer could hand over an e4m3 input.

    unusable: (direction, kernel) -> why it may not be chosen; such a kernel is not even run.
    dtype: in which the site computes.
    """
    fixed = forced(name, options)
    result: dict[str, Offers] = {}
    for direction in DIRECTIONS:
        if direction in fixed:
            choice = forced_choice(fixed[direction], direction, shape)
            result[direction] = Offers(fixed=choice)
            continue
        names, reasons = candidates(direction, shape, device, options, dtype)
        failed = {k: why for (d, k), why in (unusable or {}).items() if d == direction}
        names = [k for k in names if k not in failed]
        reasons = [*reasons, *(f"{k}: {why}" for k, why in failed.items())]
        high = None if options.emulate or not names else price(direction, HIGH_PRECISION, False)
        found: list[Candidate] = []
        for kernel in names:
            errors = quantify(direction, kernel)
            found.append(_candidate(kernel, errors, direction, options, price, False))
            if handed and takes_e4m3(kernel, direction) and not options.emulate:
                found.append(_candidate(kernel, errors, direction, options, price, True))
        result[direction] = judge(found, high.us if high is not None else None, options, reasons)
    return result


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
) -> dict[str, dict[str, Choice]]:
    """Site -> direction -> Choice, over all sites at once.

    producers: site -> the site whose fused output is its input, and is read by nothing else.
    """
    slots = [(s, d) for s, per in offers.items() for d, one in per.items() if _programmable(one)]
    at = {slot: i for i, slot in enumerate(slots)}
    taken: list[list[Candidate]] = []
    programme: list[list[Option]] = []
    for site, direction in slots:
        one = offers[site][direction]
        assert one.high_us is not None
        own, priced = [HIGH], [Option(one.high_us)]
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
            assert candidate.us is not None
            own.append(candidate)
            priced.append(Option(candidate.us, candidate.score, needs))
        taken.append(own)
        programme.append(priced)
    budget = options.loss_budget if options.gate == "budget" else None
    picked = dict(zip(slots, assign.solve(programme, budget), strict=True))
    return {
        site: {
            d: conclude(one, options, taken[at[site, d]][picked[site, d]])
            if (site, d) in at
            else conclude(one, options)
            for d, one in per.items()
        }
        for site, per in offers.items()
    }


def _programmable(one: Offers) -> bool:
    """Something to choose from, all of it with a price."""
    return one.fixed is None and bool(one.passed) and one.timed
