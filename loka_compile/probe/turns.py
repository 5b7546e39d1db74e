"""Whose turn it is: of many sites a late probe looks at a few, one group after the other.

What a probed step costs grows with the sites that it looks at, and most of it is the host, which
launches some 15 small kernels for each. So a late probe costs the same for a model of a hundred
linears as for one of a few; the early ones look at all, and `probe_every` says how often.

All observers lie in the same compiled code: one that is not asked returns before it launches
anything. A CUDA graph would replay what was asked when it was recorded, so there all are asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from loka_compile.probe.places import Place
from loka_compile.probe.places import Places
from loka_compile.probe.statistics import Statistics

#: Sites that one late probe looks at: of twenty each comes every seventh probe.
SITES = 3


class Group(Protocol):
    @property
    def site(self) -> str: ...


class Turns:
    """Of the sites of one graph and set of parameters; `groups`: of `places`, one by one."""

    def __init__(self, groups: Sequence[Group], places: Places) -> None:
        by_site: dict[str, list[Place]] = {}
        for group, place in zip(groups, places.groups, strict=True):
            by_site.setdefault(group.site, []).append(place)
        names = sorted(by_site)
        parts = max(-(-len(names) // SITES), 1)
        # Every `parts`th site: neighbours, such as those of one block, are not asked together.
        self.parts = [
            [place for name in names[at::parts] for place in by_site[name]] for at in range(parts)
        ]
        self.taken = 0

    def take(self) -> None:
        """The next part is asked, the others rest, until the next turn: the gradients of this step
        are still to come. All ranks take the same turns."""
        for at, part in enumerate(self.parts):
            for place in part:
                place.rests = at != self.taken % len(self.parts)
        self.taken += 1

    def news(self) -> list[Statistics] | None:
        """What may have changed since the last probe's forward: what this turn asks for, and the
        one before, whose gradients came behind it. None in the first, for any site's: the early
        probes asked all."""
        if self.taken < 2:
            return None
        newest = {(self.taken - back) % len(self.parts) for back in (1, 2)}
        return [place.held for at in sorted(newest) for place in self.parts[at]]
