"""Who may leave high precision at all, and what a planned kernel runs as on a device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.select import candidates
from loka_compile.lowering.select import forced
from loka_compile.lowering.select import why_high
from loka_compile.names import Site
from loka_compile.options import Options


def shape_of(site: Site) -> GemmShape:
    return GemmShape(site.m, site.k, site.n)


def eligible(sites: Iterable[Site], device: torch.device, options: Options) -> frozenset[str]:
    """Names of the sites for which some FP8 kernel could run, or is forced, in some direction."""
    names = set()
    for site in sites:
        by_force = is_forced(site, options)
        high = why_high(site.name, site.head, "", options, site.features) is not None
        if site.refusal or (high and not by_force):
            continue
        if by_force or any(
            candidates(d, shape_of(site), device, options, site.dtype)[0] for d in DIRECTIONS
        ):
            names.add(site.name)
    return frozenset(names)


def is_forced(site: Site, options: Options) -> bool:
    return any(k != HIGH_PRECISION for k in forced(site.name, options, site.features).values())


def why_none(sites: Iterable[Site], device: torch.device, options: Options) -> str:
    """Why no site is eligible, in few words."""
    reasons = {why_high(s.name, s.head, s.refusal, options, s.features): None for s in sites}
    for site in sites:
        reasons.update(
            dict.fromkeys(candidates("fwd", shape_of(site), device, options, site.dtype)[1])
        )
    return "; ".join(list(filter(None, reasons))[:2]) or "no kernel offers this"


def runnable(kernel: str, device: torch.device, options: Options) -> str:
    """The kernel name as this device runs it: emulated, real, or high precision when it cannot."""
    if kernel == HIGH_PRECISION or kernel.endswith(EMULATED):
        return kernel
    library, _, _ = split_kernel_name(kernel)
    if options.emulate:
        return kernel + EMULATED
    return HIGH_PRECISION if library.why_unavailable(device) else kernel
