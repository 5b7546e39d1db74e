"""What an op is given whose gradient is observed, as a graph would give it."""

from __future__ import annotations

from torch import Tensor

from loka_compile.probe.places import BACKWARD
from loka_compile.probe.places import CELLS
from loka_compile.probe.places import Places


def probe_of(places: Places, group: int = 0) -> list[Tensor]:
    return [places.tensors[CELLS][group], places.tensors[BACKWARD]]
