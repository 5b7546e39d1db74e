"""How long kernels may be timed while plans are made: one limit for all graphs of a model.

A model with graph breaks has many graphs, each with a plan of its own, and all of them are made in
the same step, which waits for their timing. What belongs together is told by when it was captured:
a model's graphs all run, and so are captured, in steps before its first plan. A graph that comes
after that plan (a new model, a late branch) opens a limit of its own: another step waits for it.
No clock decides it, so the compiling that lies between two plans, long or short, changes nothing.
"""

from __future__ import annotations

#: Seconds of timing: of kernels of which something is expected, and of all.
SECONDS, MOST_SECONDS = 10.0, 30.0


class TimingBudget:
    """`seconds`: what timing has taken so far. `opened`: a plan has been made under it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.opened = False

    def allows(self, expected: bool) -> bool:
        """May one more kernel be timed. expected: something is expected of it without."""
        return self.seconds < (SECONDS if expected else MOST_SECONDS)


_CURRENT = TimingBudget()


def budget_of_capture() -> TimingBudget:
    """That of a graph that is captured now."""
    global _CURRENT
    if _CURRENT.opened:
        _CURRENT = TimingBudget()
    return _CURRENT
