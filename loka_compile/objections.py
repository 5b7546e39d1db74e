"""What a rank has against a plan that another rank made: hardware, libraries, its own data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from loka_compile import eligibility
from loka_compile.agreement import Objection
from loka_compile.lowering import first_use
from loka_compile.lowering import gate
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.options import Options
from loka_compile.plan import Choice
from loka_compile.plan import SitePlan
from loka_compile.probe.quantify import quantify
from loka_compile.probed_site import Probed


def to_plan(
    plans: Mapping[str, SitePlan],
    probed: Mapping[str, Probed] | None,
    device: torch.device,
    options: Options,
) -> list[Objection]:
    """Every direction of `plans` that cannot leave high precision on this rank, and why.

    probed: what this rank saw, against which the accuracy gate is held; None where the plan was
    given to it, and only what cannot run counts.
    """
    found: list[Objection] = []
    for name, plan in plans.items():
        for direction, choice in plan.directions.items():
            if not choice.is_low:
                continue
            why = _why_not_here(choice.kernel, device, options)
            if why is None and probed is not None and choice.source != "forced":
                why = _why_not_accurate(direction, choice, probed.get(name), options)
            if why is not None:
                found.append((name, direction, why))
    return found


def _why_not_here(kernel: str, device: torch.device, options: Options) -> str | None:
    if eligibility.runnable(kernel, device, options) != HIGH_PRECISION:
        return None
    library, _, _ = split_kernel_name(kernel)
    return library.why_unavailable(device) or f"{kernel} does not run on {device.type}"


def _why_not_accurate(
    direction: str, choice: Choice, one: Probed | None, options: Options
) -> str | None:
    why = "this site was not observed" if one is None else one.why_not()
    if one is None or why is not None:
        return why
    site = one.site
    if not options.emulate:
        why = first_use.why_failed(
            choice.kernel, direction, one.place.shape, site.dtype, one.place.device
        )
        if why is not None:
            return why
    w = one.weight.detach().t() if site.transposed else one.weight.detach()
    x, gy = one.statistics[(site.call, "x")], one.statistics[(site.call, "g")]
    kernel = choice.kernel + EMULATED if options.emulate else choice.kernel
    errors: Any = quantify(direction, kernel, w, x, gy, site.dtype)
    return gate.why_refused(errors, options.gate, options.max_mere)
