"""From sites to decisions: who may leave high precision, what is chosen, what the table says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from loka_compile import scoring
from loka_compile.capture import Source
from loka_compile.lowering.choose import Offers
from loka_compile.lowering.choose import forced_choice
from loka_compile.lowering.choose_sites import choose_sites
from loka_compile.lowering.choose_sites import offers_of
from loka_compile.lowering.host_costs import host_costs
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.libraries.base import ANY_EPILOGUE
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.parts import Place
from loka_compile.lowering.pays_from import with_break_even
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.select import Unusable
from loka_compile.lowering.select import candidates
from loka_compile.lowering.select import forced
from loka_compile.lowering.select import unusable
from loka_compile.lowering.select import why_high
from loka_compile.lowering.site_prices import SitePrices
from loka_compile.names import Site
from loka_compile.options import Options
from loka_compile.plan import Choice
from loka_compile.plan import SitePlan
from loka_compile.probe.quantify import quantify
from loka_compile.probe.statistics import Statistics


def shape_of(site: Site) -> GemmShape:
    return GemmShape(site.m, site.k, site.n)


def eligible(sites: Iterable[Site], device: torch.device, options: Options) -> frozenset[str]:
    """Names of the sites for which some FP8 kernel could run, or is forced, in some direction."""
    names = set()
    for site in sites:
        is_forced = _is_forced(site, options)
        high = why_high(site.name, site.head, "", options) is not None
        if site.refusal or (high and not is_forced):
            continue
        if is_forced or any(
            candidates(d, shape_of(site), device, options, site.dtype)[0] for d in DIRECTIONS
        ):
            names.add(site.name)
    return frozenset(names)


def _is_forced(site: Site, options: Options) -> bool:
    return any(k != HIGH_PRECISION for k in forced(site.name, options).values())


def why_none(sites: Iterable[Site], device: torch.device, options: Options) -> str:
    """Why no site is eligible, in few words."""
    reasons = {why_high(s.name, s.head, s.refusal, options): None for s in sites}
    for site in sites:
        reasons.update(
            dict.fromkeys(candidates("fwd", shape_of(site), device, options, site.dtype)[1])
        )
    return "; ".join(list(filter(None, reasons))[:2]) or "no kernel offers this"


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
        return None


def decide(
    probed: Sequence[Probed],
    options: Options,
    failed: Callable[[str, str], None] = lambda name, why: None,
    replay: Callable[[Mapping[str, SitePlan]], float | None] = lambda plans: None,
    note: Callable[[str], None] = lambda what: None,
) -> tuple[dict[str, SitePlan], float | None]:
    """Quantify and price every kernel that could run at each site, and choose over all of them.

    A site that cannot be quantified stays in high precision; `failed(name, why)` hears of it, and
    `note` of kernels that failed their first use. replay: for gate="budget", the loss of the whole
    assignment on rows that no probe saw, None where that cannot be had; it comes back beside the
    plans.
    """
    offers: dict[str, dict[str, Offers]] = {}
    plans: dict[str, SitePlan] = {}
    prices: dict[str, SitePrices] = {}
    not_here = _first_uses(probed, options, note)
    for one in probed:
        name = one.site.name
        why = one.why_not()
        if one.stays and not (options.emulate or _is_forced(one.site, options)):
            why = one.stays
        if why is None:
            try:
                if not options.emulate:
                    producer = prices.get(one.producer or "")
                    prices[name] = SitePrices(
                        one.place,
                        tune=options.tune,
                        producer=producer,
                        host=host_costs(one.place.device, options.mode),
                    )
                offers[name] = _offers(one, options, prices.get(name), not_here.get(name, {}))
                continue
            except Exception as error:
                why = f"could not be quantified: {type(error).__name__}: {error}"
                failed(name, why)
        plans[name] = stay_high(one.site, one.fused, why)
    producers = {p.site.name: p.producer for p in probed if p.producer}
    bounded = {p.site.name: p.bounded for p in probed if p.bounded}
    work = {p.site.name: 2.0 * p.site.m * p.site.k * p.site.n for p in probed}

    def choose(budget: float) -> dict[str, SitePlan]:
        limited = replace(options, loss_budget=budget)
        chosen = choose_sites(offers, producers, limited, prices, work, bounded)
        found = dict(plans)
        for one in probed:
            if one.site.name in chosen:
                choices = with_break_even(chosen[one.site.name], one.place, options)
                found[one.site.name] = _site_plan(one.site, one.fused, choices)
        return found

    if options.gate != "budget":
        return choose(options.loss_budget), None
    return scoring.within(choose, replay, options.loss_budget)


def _first_uses(
    probed: Sequence[Probed], options: Options, note: Callable[[str], None]
) -> dict[str, Unusable]:
    """Site -> the kernels that may not be chosen for it, because they failed on its shape."""
    found: dict[str, Unusable] = {}
    gemms: dict[tuple[torch.device, tuple[str, ...]], list[Probed]] = {}
    for one in probed:
        gemms.setdefault((one.place.device, tuple(one.directions)), []).append(one)
    for (device, directions), here in gemms.items():
        shapes = [(one.place.shape, one.site.dtype) for one in here]
        outcomes = unusable(shapes, device, options, directions)
        for one, why_not in zip(here, outcomes, strict=True):
            found[one.site.name] = why_not
            for (direction, kernel), why in why_not.items():
                note(f"{one.site.name} {direction}: {kernel} may not be chosen: {why}")
    return found


def _offers(
    one: Probed, options: Options, prices: SitePrices | None, not_here: Unusable
) -> dict[str, Offers]:
    site, place = one.site, one.place
    x, gy = one.statistics[(site.call, "x")], one.statistics.get((site.call, "g"))
    w = one.weight.detach().t() if site.transposed else one.weight.detach()

    def errors(direction: str, kernel: str) -> Any:
        name = kernel + EMULATED if options.emulate else kernel
        return quantify(direction, name, w, x, gy, site.dtype)

    def score(kernel: str) -> float | str:
        if one.nats is None:
            return "the loss needs a backward, and there was none"
        try:
            return one.nats(kernel + EMULATED if options.emulate else kernel, w)
        except scoring.NoScoreError as error:
            return str(error)

    return offers_of(
        site.name,
        place.shape,
        place.device,
        options,
        errors,
        prices,
        score if options.gate == "budget" else None,
        one.directions,
        not_here,
        site.dtype,
    )


def forced_plan(site: Site, options: Options) -> SitePlan | None:
    """The decision where the user's word leaves nothing to probe: all three directions forced."""
    fixed = forced(site.name, options)
    if site.refusal or set(fixed) != set(DIRECTIONS):
        return None
    # Whether it is fused shows once the graph has been rewritten; `dispatch` looks again.
    shape = replace(shape_of(site), epilogue=ANY_EPILOGUE)
    chosen = {d: forced_choice(kernel, d, shape) for d, kernel in fixed.items()}
    return _site_plan(site, None, chosen)


def stay_high(site: Site, fused: str | None, why: str) -> SitePlan:
    return _site_plan(site, fused, dict.fromkeys(DIRECTIONS, Choice(reason=why)))


def _site_plan(site: Site, fused: str | None, chosen: Mapping[str, Choice]) -> SitePlan:
    return SitePlan(
        name=site.name,
        M=site.m,
        K=site.k,
        N=site.n,
        dtype=str(site.dtype).removeprefix("torch."),
        fused=fused,
        directions=chosen,
    )


def runnable(kernel: str, device: torch.device, options: Options) -> str:
    """The kernel name as this device runs it: emulated, real, or high precision when it cannot."""
    if kernel == HIGH_PRECISION or kernel.endswith(EMULATED):
        return kernel
    library, _, _ = split_kernel_name(kernel)
    if options.emulate:
        return kernel + EMULATED
    return HIGH_PRECISION if library.why_unavailable(device) else kernel


def table(
    sites: Sequence[Site],
    plans: Mapping[str, SitePlan],
    fused: Mapping[str, str],
    allowed: frozenset[str],
    device: torch.device,
    options: Options,
    training: bool,
) -> list[dict[str, Any]]:
    """One row per site, decided or not, in the form that reports and JSON use."""
    rows = []
    for site in sites:
        plan = plans.get(site.name)
        directions = {}
        for direction in DIRECTIONS:
            choice = plan.choice(direction) if plan is not None else Choice()
            if plan is None or site.name not in allowed:
                in_chain = site.name in fused
                choice = Choice(
                    reason=_why_undecided(site, direction, device, options, training, in_chain)
                )
            elif choice.is_low and runnable(choice.kernel, device, options) == HIGH_PRECISION:
                library, _, _ = split_kernel_name(choice.kernel)
                why = library.why_unavailable(device)
                reason = f"planned {choice.kernel}: {why}"
                choice = replace(choice, kernel=HIGH_PRECISION, reason=reason)
            directions[direction] = asdict(choice)
        rows.append(
            {
                "name": site.name,
                "M": site.m,
                "K": site.k,
                "N": site.n,
                "dtype": str(site.dtype).removeprefix("torch."),
                "count": 1,
                "fused": fused.get(site.name),
                "directions": directions,
            }
        )
    return rows


def _why_undecided(
    site: Site,
    direction: str,
    device: torch.device,
    options: Options,
    training: bool,
    in_chain: bool,
) -> str:
    why = why_high(site.name, site.head, site.refusal, options)
    if why is not None:
        return why
    shape = replace(shape_of(site), epilogue=ANY_EPILOGUE if in_chain else "")
    names, reasons = candidates(direction, shape, device, options, site.dtype)
    if not names:
        return "; ".join(reasons) or "no library may be chosen (options)"
    if training:
        return "probing"
    why = "no plan covers this site yet"
    return why + ("; gate='budget' makes one in training" if options.gate == "budget" else "")


def left_alone(source: Source, options: Options) -> dict[str, int]:
    """What the Mods would have changed in `source`, counted by kind."""
    from loka_compile import variant

    records = variant.rewrite(source, variant.Decided(True), options).records
    return dict(Counter(note.what for r in records for note in r.changes))
