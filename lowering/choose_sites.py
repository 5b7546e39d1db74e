"""Choices of all sites at once: each direction's offers, and what couples them along a chain."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
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
) -> dict[str, Offers]:
    """Direction -> Offers for one site. prices: None where nothing is timed, as in emulation."""
    fixed = forced(name, options)
    result: dict[str, Offers] = {}
    for direction in DIRECTIONS:
        if direction in fixed:
            choice = forced_choice(fixed[direction], direction, shape)
            result[direction] = Offers(fixed=choice)
            continue
        names, reasons = candidates(direction, shape, device, options)
        high = None if prices is None or not names else prices.alone(direction, HIGH_PRECISION)
        found: list[Candidate] = []
        for kernel in names:
            cost = None if prices is None else prices.alone(direction, kernel)
            us, source, note = (None, "", "") if cost is None else (cost.us, cost.source, cost.note)
            found.append(Candidate(kernel, quantify(direction, kernel), us, source, note))
        high_us = high.us if high is not None else None
        result[direction] = judge(found, high_us, options, reasons, joint=True)
    return result


def choose_sites(
    offers: Mapping[str, Mapping[str, Offers]],
    producers: Mapping[str, str],
    options: Options,
    prices: Mapping[str, SitePrices],
) -> dict[str, dict[str, Choice]]:
    """Site -> direction -> Choice, over all sites at once.

    producers: site -> the site whose fused output is its input, and is read by nothing else; it
    stands before its reader in `offers`. prices: of the sites that have any.
    """
    programme = Programme(options.min_speedup)
    for site, per in offers.items():
        if site in prices and any(map(_programmable, per.values())):
            kernels = {d: _kernels(per[d], options) for d in DIRECTIONS}
            programme.add(site, kernels, prices[site], producers.get(site))
    outcomes = programme.solve(options.loss_budget if options.gate == "budget" else None)
    return {
        site: {
            d: conclude(one, options, outcomes.get((site, d)) if _programmable(one) else None)
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


def _kernels(one: Offers, options: Options) -> list[Kernel]:
    """What may run there: one kernel where there is nothing to choose."""
    if not _programmable(one):
        return [Kernel(conclude(one, options).kernel)]
    return [Kernel(HIGH_PRECISION), *(Kernel(c.kernel, c.score) for c, _ in one.passed)]


def _programmable(one: Offers) -> bool:
    """Something to choose from, all of it with a price."""
    return one.fixed is None and bool(one.passed) and one.timed
