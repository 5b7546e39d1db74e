"""A site and what its probes saw, and the decisions about it that need no planner.

Apart from `planner.py`, which most starts never need: a pinned plan decides everything.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace

from torch import Tensor

from loka_compile.eligibility import shape_of
from loka_compile.lowering.libraries.base import ANY_EPILOGUE
from loka_compile.lowering.parts import Place
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.select import forced
from loka_compile.names import Site
from loka_compile.options import Options
from loka_compile.plan import Choice
from loka_compile.plan import SitePlan
from loka_compile.probe.statistics import AMAX
from loka_compile.probe.statistics import NON_FINITE
from loka_compile.probe.statistics import Statistics


@dataclass(frozen=True)
class Probed:
    """A site with all that a decision about it needs.

    fused: its chain's id, if it is fused; epilogue: what runs behind its GEMM, as cost keys spell
    it; producer: the site whose fused output it reads, if nobody else does; bounded: the value that
    it reads, if that is the result of a norm on its own.
    """

    site: Site
    weight: Tensor
    statistics: Mapping[tuple[int, str], Statistics]
    fused: str | None = None
    epilogue: str = ""
    producer: str | None = None
    #: gate="budget": (forward kernel, its (N, K) weight) -> nats; raises NoScoreError.
    nats: Callable[[str, Tensor], float] | None = None
    #: Without gradients (calibration) there is a forward to decide, and no more.
    directions: Sequence[str] = DIRECTIONS
    #: Why it is better off in high precision whatever its GEMM would gain, see `neighbours.Chain`.
    stays: str = ""
    bounded: str | None = None

    @property
    def place(self) -> Place:
        layout = "kn" if self.site.transposed else "nk"
        shape = replace(shape_of(self.site), epilogue=self.epilogue)
        return Place(shape, self.site.dtype, self.weight.device, layout, self.epilogue)

    def why_not(self) -> str | None:
        x, gy = (self.statistics.get((self.site.call, role)) for role in ("x", "g"))
        for what, held in (("input", x), ("gradient", gy)):
            if what == "gradient" and tuple(self.directions) == ("fwd",):
                continue
            if held is None or held.batches == 0:
                return f"no {what} of this site was seen while probing"
            if held.scalars[AMAX] == 0 and held.scalars[NON_FINITE] == 0:
                # Every kernel gets zeros right.
                return f"its {what} was zero at every probed step, which shows no kernel's error"
        return None


def forced_plan(site: Site, options: Options) -> SitePlan | None:
    """The decision where the user's word leaves nothing to probe: all three directions forced."""
    fixed = forced(site.name, options, site.features)
    if site.refusal or set(fixed) != set(DIRECTIONS):
        return None
    from loka_compile.lowering.choose import forced_choice

    # Whether it is fused shows once the graph has been rewritten; `dispatch` looks again.
    shape = replace(shape_of(site), epilogue=ANY_EPILOGUE)
    chosen = {d: forced_choice(kernel, d, shape) for d, kernel in fixed.items()}
    return site_plan(site, None, chosen)


def stay_high(site: Site, fused: str | None, why: str) -> SitePlan:
    return site_plan(site, fused, dict.fromkeys(DIRECTIONS, Choice(reason=why)))


def site_plan(site: Site, fused: str | None, chosen: Mapping[str, Choice]) -> SitePlan:
    return SitePlan(
        name=site.name,
        M=site.m,
        K=site.k,
        N=site.n,
        dtype=str(site.dtype).removeprefix("torch."),
        fused=fused,
        directions=chosen,
    )
