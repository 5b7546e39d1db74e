"""Host and device work side by side: a step takes as long as the longer of the two.

    T(choice) = max(sum of the device's microseconds, sum of the host's microseconds)

A kernel that takes the device less time and the host more is worth it while the device is what the
step waits for. Its dual is solved: a microsecond of the device is worth `share` and one of the host
1 - share. With share 1 the host is left out of account; where it then needs longer than the device,
the share between is sought at which both need the same, and the best choice seen on the way is
taken. The gap to the optimum is what one kernel more or less would move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Halvings of the share: the last one tells apart what differs by 2 %.
_ROUNDS = 6


def balanced(solve: Callable[[float], T], totals: Callable[[T], tuple[float, float]]) -> T:
    """The answer with the least max(device, host). solve: share -> an answer that is best by it;
    totals: microseconds of the device and of the host that an answer takes."""
    best = solve(1.0)
    device, host = totals(best)
    if host <= device:
        return best
    # Of two that the host needs as long for, the one with less for the device.
    least = (host, device)
    low, high = 0.0, 1.0
    for _ in range(_ROUNDS):
        share = (low + high) / 2
        one = solve(share)
        device, host = totals(one)
        now = (max(device, host), device + host)
        if now < least:
            least, best = now, one
        low, high = (low, share) if host > device else (share, high)
    return best
