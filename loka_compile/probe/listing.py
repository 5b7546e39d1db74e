"""What the Probe holds, by site: statistics, memory, flat numbers for loggers."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from loka_compile.plan import SitePlan
from loka_compile.probe import weights as wt
from loka_compile.probe.statistics import Statistics

ROLES = {"x": "input", "g": "gradient"}


class Probed(Protocol):
    """A parameter's record in the ledger."""

    ref: weakref.ref[Tensor]
    name: str
    emulated: bool
    sites: dict[int, SitePlan]
    statistics: dict[tuple[int, str], Statistics]


def site_name(entry: Probed, call: int) -> str:
    return entry.name + (f"#{call}" if call else "")


def collect(entries: Iterable[Probed]) -> dict[tuple[str, str], Statistics]:
    """(site, role) -> statistics. Two parameters of one name are numbered: `name@2`."""
    found: dict[tuple[str, str], Statistics] = {}
    for entry in sorted(entries, key=lambda e: e.name):
        for (call, role), held in entry.statistics.items():
            site, other = site_name(entry, call), 1
            while (site, role) in found:
                other += 1
                site = f"{site_name(entry, call)}@{other}"
            found[(site, role)] = held
    return found


def say_memory(entries: Iterable[Probed]) -> str:
    """What the state of these parameters takes, for reports; each of them once."""
    sizes = {
        site_name(entry, call): sum(s.nbytes for (c, _), s in entry.statistics.items() if c == call)
        for entry in dict.fromkeys(entries)
        for call in {c for c, _ in entry.statistics}
    }
    if not sizes:
        return "the Probe holds nothing"
    largest = max(sizes, key=lambda name: sizes[name])
    return (
        f"the Probe holds {sum(sizes.values()) / 1e6:.3g} MB on the device for {len(sizes)} sites, "
        f"at most {sizes[largest] / 1e6:.3g} MB for one ({largest})"
    )


def metrics(
    state: Mapping[tuple[str, str], Statistics], weights: Mapping[str, Tensor], prefix: str = "loka"
) -> dict[str, float]:
    """Flat numbers for loggers: `<prefix>/<site>/<input|gradient|weight>/<what>`."""
    found: dict[str, float] = {}
    for (site, role), held in state.items():
        for what, value in held.summary().items():
            found[f"{prefix}/{site}/{ROLES[role]}/{what}"] = float(value)
    for site, row in weights.items():
        for what, value in wt.summary(row).items():
            found[f"{prefix}/{site}/weight/{what}"] = value
    return {k: v for k, v in found.items() if math.isfinite(v)}
