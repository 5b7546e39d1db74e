"""Rows of the report's table of sites, decided or not, and what the Mods left alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import replace
from typing import Any

import torch

from loka_compile.capture import Source
from loka_compile.eligibility import runnable
from loka_compile.eligibility import shape_of
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.libraries.base import ANY_EPILOGUE
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.select import candidates
from loka_compile.lowering.select import why_high
from loka_compile.mod_set import ModSet
from loka_compile.names import Site
from loka_compile.options import Options
from loka_compile.plan import Choice
from loka_compile.plan import SitePlan


def table(
    sites: Sequence[Site],
    plans: Mapping[str, SitePlan],
    fused: Mapping[str, str],
    allowed: frozenset[str],
    device: torch.device,
    options: Options,
    training: bool,
    pinned: bool = False,
) -> list[dict[str, Any]]:
    """One row per site, decided or not, in the form that reports and JSON use.

    pinned: a plan was given, and nothing but it decides.
    """
    rows = []
    for site in sites:
        plan = plans.get(site.name)
        directions = {}
        for direction in DIRECTIONS:
            choice = plan.choice(direction) if plan is not None else Choice()
            if plan is None or site.name not in allowed:
                in_chain = site.name in fused
                why = _why_undecided(site, direction, device, options, in_chain)
                choice = Choice(reason=why or _undecided(options, training, pinned))
            elif choice.is_low and runnable(choice.kernel, device, options) == HIGH_PRECISION:
                library, _, _ = split_kernel_name(choice.kernel)
                why = library.why_unavailable(device)
                reason = f"planned {choice.kernel}: {why}"
                choice = replace(choice, kernel=HIGH_PRECISION, reason=reason)
            directions[direction] = asdict(choice)
        rows.append(
            {
                "name": site.name,
                "M": site.m,
                "K": site.k,
                "N": site.n,
                "dtype": str(site.dtype).removeprefix("torch."),
                "count": 1,
                "fused": fused.get(site.name),
                "directions": directions,
            }
        )
    return rows


def _why_undecided(
    site: Site, direction: str, device: torch.device, options: Options, in_chain: bool
) -> str | None:
    """Why nothing can be decided here but high precision, if so."""
    why = why_high(site.name, site.head, site.refusal, options, site.features)
    if why is not None:
        return why
    shape = replace(shape_of(site), epilogue=ANY_EPILOGUE if in_chain else "")
    names, reasons = candidates(direction, shape, device, options, site.dtype)
    return None if names else "; ".join(reasons) or "no library may be chosen (options)"


def _undecided(options: Options, training: bool, pinned: bool) -> str:
    if pinned:
        return "the given plan has no such layer and shape"
    if training:
        return "probing"
    why = "no plan covers this site yet"
    return why + ("; gate='budget' makes one in training" if options.gate == "budget" else "")


def left_alone(source: Source, options: Options, mods: ModSet) -> dict[str, int]:
    """What `mods` would have changed in `source`, counted by kind."""
    from loka_compile import variant

    records = variant.rewrite(source, variant.Decided(mods), options).records
    return dict(Counter(note.what for r in records for note in r.changes))
