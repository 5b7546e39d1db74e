"""Which steps are probed: the first ones, then one per window of `every` steps, at a random place.

Never exactly every 100th: a loader that goes round its sources in a cycle would show one of them
only. The draw depends on the seed and the window alone, so all ranks probe the same steps and a
resumed run goes on as if it had not stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

from loka_compile.options import PROBE_STEPS

_MASK = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class Schedule:
    """Steps count from 1. every: width of a window; 0: nothing after the early steps."""

    every: int
    seed: int = 0
    early: int = PROBE_STEPS

    def probed_in(self, window: int) -> int:
        """The probed step of window 0, 1, ..., which spans `every` steps behind the early ones."""
        return self.early + window * self.every + 1 + _hash(self.seed, window) % self.every

    def next_after(self, step: int) -> int | None:
        """The first probed step later than `step`; None when there is none."""
        if step < self.early:
            return step + 1
        if not self.every:
            return None
        window = (step - self.early) // self.every
        at = self.probed_in(window)
        return at if at > step else self.probed_in(window + 1)


def _hash(seed: int, window: int) -> int:
    """splitmix64: the same everywhere, unlike `hash()` and global random states."""
    z = (seed * 0xD1342543DE82EF95 + (window + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
