"""Host and device work side by side: a step takes as long as the longer of the two.

    T(choice) = max(sum of the device's microseconds, sum of the host's microseconds)

A kernel that takes the device less time and the host more is worth it while the device is what the
step waits for. Its dual is solved: a microsecond of the device is worth `share` and one of the host
1 - share. With share 1 the host is left out of account; where it then needs longer than the device,
the share between is sought at which both need the same, and the best choice seen on the way is
taken. Equal blocks of a model all change their minds at the same share, so what lies between the
two sides of it is tried as well: some of them so, the others otherwise. Near the optimum, not it.

What the linears alone take says little of a step whose other kernels keep the host: `StepTimes` is
what all of it takes. It is measured while sites are observed, which is no exact measure of a step
that observes nothing; so it counts only where the host needs longer beyond doubt.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

#: Halvings of the share: the last one tells apart what differs by 2 %.
_ROUNDS = 6
#: By how much the host has to need longer for a measured step to count.
_BEYOND_DOUBT = 1.25


@dataclass(frozen=True)
class StepTimes:
    """Microseconds of a training step, forward and backward, with every linear in high precision:
    of the device, and of the host to start it. rows: M of its first linear, where that is known."""

    device: float
    host: float
    rows: int = 0

    @property
    def waits_for_host(self) -> bool:
        return self.host > _BEYOND_DOUBT * self.device

    @staticmethod
    def sum(times: Sequence[StepTimes]) -> StepTimes | None:
        """Of graphs that run one after the other; None of none."""
        if not times:
            return None
        return StepTimes(sum(t.device for t in times), sum(t.host for t in times))

    def sentence(self) -> str:
        return (
            f"a step in high precision takes the device {self.device / 1e3:.2f} ms, and the host "
            f"{self.host / 1e3:.2f} ms to start it, without what observes it"
        )


def balanced(
    solve: Callable[[float], T],
    totals: Callable[[T], tuple[float, float]],
    between: Callable[[T, T], Iterable[T]] = lambda one, other: (),
) -> T:
    """The answer with the least max(device, host) of all that are looked at.

    solve: share -> an answer that is best by it. totals: microseconds of the device and of the host
    that an answer takes. between: answers that are one in part and the other in the rest.
    """

    def measure(one: T) -> tuple[float, float]:
        device, host = totals(one)
        # Of two that one side needs as long for, the one with less for the other.
        return max(device, host), device + host

    best = waits_for_host = solve(1.0)
    device, host = totals(best)
    if host <= device:
        return best
    least, waits_for_device = measure(best), None
    low, high = 0.0, 1.0
    for _ in range(_ROUNDS):
        share = (low + high) / 2
        one = solve(share)
        device, host = totals(one)
        if measure(one) < least:
            least, best = measure(one), one
        if host > device:
            high, waits_for_host = share, one
        else:
            low, waits_for_device = share, one
    if waits_for_device is not None:
        for one in between(waits_for_host, waits_for_device):
            if measure(one) < least:
                least, best = measure(one), one
    return best
