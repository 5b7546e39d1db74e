"""Whose turn it is: of many sites a late probe looks at a few, one group after the other.

What a probed step costs grows with the sites that it looks at, and most of it is the host, which
launches some 15 small kernels for each. So a late probe costs the same for a model of a hundred
linears as for one of a few; the early ones look at all, and `probe_every` says how often.

All observers lie in the same compiled code: one that is not asked returns before it launches
anything. It is known by the address of its counters; a compiler that gave observers copies of them
would make all look. A CUDA graph would replay what was asked when it was recorded, so there all are
asked.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence

from torch import Tensor

#: Sites that one late probe looks at.
SITES = 4

#: Addresses of the counters (`Statistics.scalars`) of sites that are not asked at present.
_resting: set[int] = set()


def rests(scalars: Tensor) -> bool:
    """Is this site left out of the step that runs."""
    return bool(_resting) and scalars.data_ptr() in _resting


def all_look(states: Iterable[Tensor]) -> None:
    """The observers of these look from now on."""
    if _resting:
        _resting.difference_update([t.data_ptr() for t in states])


class Turns:
    """Of the sites of one graph and set of parameters; `counters`: site -> its counters."""

    def __init__(self, counters: Mapping[str, Sequence[Tensor]]) -> None:
        names = sorted(counters)
        parts = max(-(-len(names) // SITES), 1)
        # Every `parts`th site: neighbours, such as those of one block, are not asked together.
        self.groups = [
            {t.data_ptr() for name in names[at::parts] for t in counters[name]}
            for at in range(parts)
        ]
        self.taken = 0
        # The next tensors at these addresses are other sites' counters.
        weakref.finalize(self, _resting.difference_update, set().union(*self.groups))

    def take(self) -> None:
        """The next group is asked, the others rest, until the next turn: the gradients of this step
        are still to come. All ranks take the same turns."""
        asked = self.taken % len(self.groups)
        _resting.update(*(g for at, g in enumerate(self.groups) if at != asked))
        _resting.difference_update(self.groups[asked])
        self.taken += 1
