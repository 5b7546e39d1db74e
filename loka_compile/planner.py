"""From what was probed to decisions: what is chosen for every site, over all of them at once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from loka_compile import scoring
from loka_compile.eligibility import is_forced
from loka_compile.lowering import first_use
from loka_compile.lowering.balance import StepTimes
from loka_compile.lowering.choose_sites import find
from loka_compile.lowering.contest import Contest
from loka_compile.lowering.cost_store import default_table
from loka_compile.lowering.host_costs import host_costs
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.parts import Place
from loka_compile.lowering.pays_from import PaysFrom
from loka_compile.lowering.pays_from import with_break_even
from loka_compile.lowering.price_book import PriceBook
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.settle import Settling
from loka_compile.lowering.settle import Spent
from loka_compile.lowering.site_prices import SitePrices
from loka_compile.lowering.timing_budget import TimingBudget
from loka_compile.options import Options
from loka_compile.plan import SitePlan
from loka_compile.probe.quantify import quantify
from loka_compile.probed_site import Probed
from loka_compile.probed_site import site_plan
from loka_compile.probed_site import stay_high

log = logging.getLogger("loka_compile")


def decide(
    probed: Sequence[Probed],
    options: Options,
    failed: Callable[[str, str], None] = lambda name, why: None,
    replay: Callable[[Mapping[str, SitePlan]], float | None] = lambda plans: None,
    note: Callable[[str], None] = lambda what: None,
    budget: TimingBudget | None = None,
    step: StepTimes | None = None,
) -> tuple[dict[str, SitePlan], float | None]:
    """Choose over all sites what is fastest of all that runs, is right and is accurate enough.

    A site that cannot be quantified stays in high precision; `failed(name, why)` hears of it, and
    `note` of kernels that failed their first use, and of what making the plan took. replay: for
    gate="budget", the loss of the whole assignment on rows that no probe saw, None where that
    cannot be had; it comes back beside the plans.
    """
    spent = Spent()
    with spent.on(WHOLE), first_use.one_child():
        found = _decide(probed, options, failed, replay, note, spent, budget, step)
    if any(spent.counts.values()):
        note(sentence(spent))
        log.info("loka: %s", sentence(spent))
    return found


def _decide(
    probed: Sequence[Probed],
    options: Options,
    failed: Callable[[str, str], None],
    replay: Callable[[Mapping[str, SitePlan]], float | None],
    note: Callable[[str], None],
    spent: Spent,
    timing: TimingBudget | None,
    step: StepTimes | None,
) -> tuple[dict[str, SitePlan], float | None]:
    sites = {one.site.name: one for one in probed}
    high: dict[str, str] = {}
    for one in probed:
        why = one.why_not()
        if one.stays and not (options.emulate or is_forced(one.site, options)):
            why = one.stays
        if why is not None:
            high[one.site.name] = why
    open_ = [one for one in probed if one.site.name not in high]
    prices: dict[str, SitePrices] = {}
    book = PriceBook(default_table(), "never" if options.emulate else options.tune, timing)
    with spent.on("prices"):
        if not options.emulate:
            prices, unpriced = _prices(open_, options, book)
            for name, why in unpriced.items():
                high[name] = f"could not be priced: {why}"
                failed(name, high[name])
    tried: dict[Any, dict[tuple[str, str], str | None]] = {}
    contests = {
        one.site.name: _contest(one, options, prices.get(one.site.name), tried)
        for one in open_
        if one.site.name not in high
    }
    settling = Settling(contests, book, options.emulate, spent)
    settling.prepare(scored=options.gate == "budget")
    producers = {n: one.producer for n, one in sites.items() if one.producer}
    bounded = {n: one.bounded for n, one in sites.items() if one.bounded}
    work = {n: 2.0 * p.site.m * p.site.k * p.site.n for n, p in sites.items()}

    waits: list[str | None] = []

    def choose(budget: float) -> dict[str, SitePlan]:
        limited = replace(options, loss_budget=budget)
        found, offers = settling.settle(
            lambda offers, answers: find(
                offers, producers, limited, prices, work, bounded, answers, step
            ),
            budget,
        )
        chosen = found.choices(offers, limited)
        waits.append(found.waits_for_host())
        plans = {}
        pays = PaysFrom(book.table)
        with spent.on("reasons"):
            for name, one in sites.items():
                if name in chosen:
                    choices = with_break_even(chosen[name], one.place, options, pays)
                    plans[name] = site_plan(one.site, one.fused, choices)
                else:
                    why = high.get(name) or f"could not be quantified: {settling.broken[name]}"
                    plans[name] = stay_high(one.site, one.fused, why)
        return plans

    if options.gate == "budget":
        plans, nats = scoring.within(choose, replay, options.loss_budget)
    else:
        plans, nats = choose(options.loss_budget), None
    for name, why in settling.broken.items():
        failed(name, f"could not be quantified: {why}")
    for name, contest in contests.items():
        for (direction, kernel), why_not in contest.tried.items():
            if why_not is not None:
                note(f"{name} {direction}: {kernel} may not be chosen: {why_not}")
    for said in filter(None, waits[-1:]):
        note(said)
    out_of_time = untimed(settling)
    if out_of_time is not None:
        note(out_of_time)
        log.info("loka: %s", out_of_time)
    return plans, nats


def untimed(settling: Settling) -> str | None:
    """What was left to expectation, where the time for timing was up."""
    chosen, unknown = settling.untimed, len(settling.unknown())
    if settling.book.budget.allows(expected=True) or not (chosen or unknown):
        return None
    said = [f"timing stopped after {settling.book.budget.seconds:.1f} s, over all graphs so far"]
    if chosen:
        shown = ", ".join(f"{one.name} {d} {k}" for one, d, k in chosen[:3])
        more = ", ..." if len(chosen) > 3 else ""
        said.append(f"{len(chosen)} chosen kernels count as expected ({shown}{more})")
    if unknown:
        said.append(f"{unknown} could not be chosen, since nothing is known of them")
    return "; ".join([*said, "`loka bench --from-report FILE` times them all, for the next plan"])


#: The phase that holds all others.
WHOLE = "plan"


def sentence(spent: Spent) -> str:
    """`plan made in 12.3 s: first uses 4.1 (38), timing 3.2 (12), errors 4.0 (84), choice 0.2`."""
    parts = []
    for phase, seconds in spent.seconds.items():
        count = spent.counts.get("rounds" if phase == "choice" else phase)
        counted = f" ({count}{' rounds' if phase == 'choice' else ''})" if count else ""
        if phase != WHOLE and (count or seconds >= 0.05):
            parts.append(f"{phase} {seconds:.1f}{counted}")
    return f"plan made in {spent.seconds[WHOLE]:.1f} s: " + ", ".join(parts)


def _prices(
    probed: Sequence[Probed], options: Options, book: PriceBook
) -> tuple[dict[str, SitePrices], dict[str, str]]:
    """Site -> its prices, which equal sites share, or why it has none."""
    shared: dict[tuple[Place, SitePrices | None], SitePrices] = {}
    found: dict[str, SitePrices] = {}
    broken: dict[str, str] = {}
    for one in probed:
        producer = found.get(one.producer or "")
        key = one.place, producer
        try:
            if key not in shared:
                shared[key] = SitePrices(
                    one.place,
                    tune=options.tune,
                    producer=producer,
                    table=book.table,
                    host=host_costs(one.place.device, options.records_graphs),
                    book=book,
                )
            found[one.site.name] = shared[key]
        except Exception as error:
            broken[one.site.name] = f"{type(error).__name__}: {error}"
    return found, broken


def _contest(
    one: Probed,
    options: Options,
    prices: SitePrices | None,
    tried: dict[Any, dict[tuple[str, str], str | None]],
) -> Contest:
    """tried: GEMM -> what is known of first uses on it."""
    site, place = one.site, one.place
    x, gy = one.statistics.get((site.call, "x")), one.statistics.get((site.call, "g"))
    w = one.weight.detach().t() if site.transposed else one.weight.detach()

    emulated: dict[Any, Any] = {}

    def errors(direction: str, kernel: str) -> Any:
        assert x is not None
        if not options.emulate:
            return quantify(direction, kernel, w, x, gy, site.dtype)
        # Several libraries' kernels are the same in software.
        library, recipe, _ = split_kernel_name(kernel)
        same = direction, library.arithmetic(recipe, direction, site.dtype)
        if same not in emulated:
            emulated[same] = quantify(direction, kernel + EMULATED, w, x, gy, site.dtype)
        return emulated[same]

    def score(kernel: str) -> float | str:
        if one.nats is None:
            return "the loss needs a backward, and there was none"
        try:
            return one.nats(kernel + EMULATED if options.emulate else kernel, w)
        except scoring.NoScoreError as error:
            return str(error)

    return Contest(
        site.name,
        place.shape,
        place.device,
        options,
        errors,
        prices,
        score if options.gate == "budget" else None,
        one.directions,
        site.dtype,
        tried.setdefault((place.shape, place.device, site.dtype), {}),
    )
