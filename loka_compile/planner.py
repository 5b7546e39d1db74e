"""From sites to decisions: who may leave high precision, what is chosen, what the table says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from loka_compile.capture import Source
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.measure import latency_us
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.select import candidates
from loka_compile.lowering.select import choose_site
from loka_compile.lowering.select import forced
from loka_compile.lowering.select import why_high
from loka_compile.names import Site
from loka_compile.options import Options
from loka_compile.plan import Choice
from loka_compile.plan import SitePlan
from loka_compile.probe.quantify import quantify
from loka_compile.probe.statistics import Statistics


def shape_of(site: Site) -> GemmShape:
    return GemmShape(site.m, site.k, site.n)


def eligible(sites: Iterable[Site], device: torch.device, options: Options) -> frozenset[str]:
    """Names of the sites for which some FP8 kernel could run, or is forced, in some direction."""
    names = set()
    for site in sites:
        is_forced = _is_forced(site, options)
        high = why_high(site.name, site.head, "", options) is not None
        if site.refusal or (high and not is_forced):
            continue
        if is_forced or any(candidates(d, shape_of(site), device, options)[0] for d in DIRECTIONS):
            names.add(site.name)
    return frozenset(names)


def _is_forced(site: Site, options: Options) -> bool:
    return any(k != HIGH_PRECISION for k in forced(site.name, options).values())


def decide_site(
    site: Site,
    weight: Tensor,
    statistics: Mapping[tuple[int, str], Statistics],
    fused: str | None,
    epilogue: str,
    options: Options,
) -> SitePlan:
    """Quantify every kernel that could run at `site`, and choose per direction.

    `epilogue` names the fused chain that the site opens, "" for none: see `GemmShape`.
    """
    x = statistics[(site.call, "x")]
    gy = statistics.get((site.call, "g"))
    w = weight.detach().t() if site.transposed else weight.detach()
    shape = replace(shape_of(site), epilogue=epilogue)

    def errors(direction: str, kernel: str) -> Any:
        name = kernel + EMULATED if options.emulate else kernel
        return quantify(direction, name, w, x, gy, site.dtype)

    def latency(direction: str, kernel: str) -> float | None:
        return latency_us(direction, kernel, shape, site.dtype, weight.device)

    if x.batches == 0 or gy is None or gy.batches == 0:
        what = "input" if x.batches == 0 else "gradient"
        return stay_high(site, fused, f"no {what} of this site was seen while probing")
    chosen = choose_site(site.name, shape, weight.device, options, errors, latency)
    return _site_plan(site, fused, chosen)


def stay_high(site: Site, fused: str | None, why: str) -> SitePlan:
    return _site_plan(site, fused, dict.fromkeys(DIRECTIONS, Choice(reason=why)))


def _site_plan(site: Site, fused: str | None, chosen: Mapping[str, Choice]) -> SitePlan:
    return SitePlan(
        name=site.name,
        M=site.m,
        K=site.k,
        N=site.n,
        dtype=str(site.dtype).removeprefix("torch."),
        fused=fused,
        directions=chosen,
    )


def runnable(kernel: str, device: torch.device, options: Options) -> str:
    """The kernel name as this device runs it: emulated, real, or high precision when it cannot."""
    if kernel == HIGH_PRECISION or kernel.endswith(EMULATED):
        return kernel
    library, _, _ = split_kernel_name(kernel)
    if options.emulate:
        return kernel + EMULATED
    return HIGH_PRECISION if library.why_unavailable(device) else kernel


def table(
    sites: Sequence[Site],
    plans: Mapping[str, SitePlan],
    fused: Mapping[str, str],
    allowed: frozenset[str],
    device: torch.device,
    options: Options,
    training: bool,
) -> list[dict[str, Any]]:
    """One row per site, decided or not, in the form that reports and JSON use."""
    rows = []
    for site in sites:
        plan = plans.get(site.name)
        directions = {}
        for direction in DIRECTIONS:
            choice = plan.choice(direction) if plan is not None else Choice()
            if plan is None or site.name not in allowed:
                choice = replace(
                    Choice(), reason=_why_undecided(site, direction, device, options, training)
                )
            elif choice.is_fp8 and runnable(choice.kernel, device, options) == HIGH_PRECISION:
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
    site: Site, direction: str, device: torch.device, options: Options, training: bool
) -> str:
    why = why_high(site.name, site.head, site.refusal, options)
    if why is not None:
        return why
    names, reasons = candidates(direction, shape_of(site), device, options)
    if not names:
        return "; ".join(reasons) or "no library may be chosen (options)"
    return "probing" if training else "no plan covers this site yet"


def left_alone(source: Source, options: Options) -> dict[str, int]:
    """What the Mods would have changed in `source`, counted by kind."""
    from loka_compile import variant

    records = variant.rewrite(source, variant.Decided(True), options).records
    return dict(Counter(note.what for r in records for note in r.changes))
