"""How much of a run was FP8: of its steps, and of the FLOPs of its linear layers."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import numpy as np

DIRECTIONS = ("fwd", "dgrad", "wgrad")
#: Names under which a kernel or recipe multiplies in high precision.
_HIGH = ("high", "hp", "bf16", "fp16", "fp32", "tf32", "bfloat16", "float16", "float32", "none")


def is_fp8(choice: Mapping[str, Any] | None) -> bool:
    """Whether a site's direction (``{"kernel": .., "recipe": ..}``) multiplies in FP8."""
    if not choice or not choice.get("kernel"):
        return False
    kernel = str(choice["kernel"]).lower()
    return kernel.replace(":", "_").split("_")[0] not in _HIGH


def site_flops(site: Mapping[str, Any]) -> tuple[float, float]:
    """(FP8, all) FLOPs of one step at ``site``: 2 M K N per direction it has, times its calls."""
    one = 2.0 * site["M"] * site["K"] * site["N"] * (site.get("count") or 1)
    # A first layer whose input needs no gradient has no dgrad product at all.
    present = [c for c in (site["directions"].get(d) for d in DIRECTIONS) if c is not None]
    return one * sum(map(is_fp8, present)), one * len(present)


def given_up(sites: Iterable[Mapping[str, Any]]) -> list[str]:
    """Directions that lost a kernel while a step ran, with the reason: a share without them speaks
    of less than was chosen."""
    from loka_compile.demotion import FAILED

    return [
        f"{site['name']} {direction}: {choice['reason']}"
        for site in sites
        for direction, choice in site["directions"].items()
        if choice and FAILED in (choice.get("reason") or "")
    ]


def fp8_share(
    sites: Iterable[Mapping[str, Any]], plan_active: np.ndarray
) -> dict[str, float | None]:
    """``{"steps", "flops"}`` in 0..1; the denominator of both is the whole run.

    ``plan_active`` is bool ``[steps]``. FLOPs are those of the linear GEMMs of the dense part,
    forward, dgrad and wgrad.
    """
    pairs = [site_flops(s) for s in sites]
    fp8, total = sum(p[0] for p in pairs), sum(p[1] for p in pairs)
    active = float(plan_active.mean()) if len(plan_active) else 0.0
    return {
        "steps": active if fp8 else 0.0,
        "flops": active * fp8 / total if total else None,
    }
