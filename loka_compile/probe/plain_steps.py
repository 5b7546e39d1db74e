"""What plain steps record: the maxima that their FP8 kernels compute anyway, read on request.

The kernel that finishes a maximum stores it into the site's cells (`lowering/meters.py`): no kernel
more, nothing waited for, and a replayed CUDA graph stores like any other step. Nobody looks at the
cells but `plain_metrics`, which waits for the device.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from loka_compile.lowering import meters


@dataclass(frozen=True, eq=False)
class Cells:
    """Of one set of parameters in one graph.

    values: int64, one row of cells per site, in the places that `meters.place_of` gives them.
    """

    sites: tuple[str, ...]
    values: Tensor

    @classmethod
    def of(cls, sites: tuple[str, ...], device: torch.device) -> Cells:
        shape = meters.shape_of(len(sites))
        one = cls(sites, torch.empty(shape, dtype=torch.int64, device=device))
        one.clear()
        _ALIVE.add(one)
        return one

    def clear(self) -> None:
        halves = self.values.view(torch.float32)
        halves[..., 0::2] = math.nan
        halves[..., 1::2] = 0

    def read(self) -> Iterator[tuple[str, dict[str, float]]]:
        held = self.values.cpu().view(torch.float32)
        for index, site in enumerate(self.sites):
            row = held[meters.place_of(index, len(self.sites))].tolist()
            found: dict[str, float] = {}
            for role, at in (("x", meters.X), ("gradient", meters.GRADIENT)):
                found |= _numbers(role, row[2 * at], row[2 * at + 1])
            if found:
                yield site, found


_ALIVE: weakref.WeakSet[Cells] = weakref.WeakSet()


def _numbers(role: str, newest: float, most: float) -> dict[str, float]:
    """Nothing of an operand whose maximum no step has found (a NaN one has made `most` NaN too)."""
    if math.isnan(newest) and most == 0:
        return {}
    return {
        f"{role}_amax": newest,
        f"{role}_amax_most": most,
        f"{role}_saturated": float(not math.isfinite(newest)),
    }


def plain_metrics(*, reset: bool = False) -> dict[str, dict[str, float]]:
    """site -> what its FP8 kernels found on the newest step, and since the start or last reset.

    `x_amax`, `gradient_amax`: max |value| of the input, and of the gradient of the output, of the
    newest plain step; `*_amax_most`: the largest of all plain steps; `*_saturated`: 1 where the
    newest maximum was no finite number, else 0: scales follow the maximum, so that nothing finite
    passes the format. Only operands with one scale for the tensor, quantised where they are read,
    have entries; the gradient's has none where saved-tensor hooks copy what a forward saves (such
    as `save_on_cpu`). reset: forget all maxima.

    Waits for the device. Two models' sites of one name are numbered: `name@2`.
    """
    found: dict[str, dict[str, float]] = {}
    for one in sorted(_ALIVE, key=lambda cells: cells.sites):
        for site, numbers in one.read():
            name, other = site, 1
            while name in found:
                other += 1
                name = f"{site}@{other}"
            found[name] = numbers
        if reset:
            one.clear()
    return found
