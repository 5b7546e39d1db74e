"""What the quality figures share: studies over paired seeds, written with what the paper has."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

from curves import draw

from loka_compile.files import write_text
from loka_compile.train import metrics
from loka_compile.train.pairs import Pairing
from loka_compile.train.pairs import summarise
from loka_compile.train.study import StudyConfig
from loka_compile.train.study import Unit
from loka_compile.train.study import load_trace
from loka_compile.train.study import run_units

RESULTS = Path(__file__).parents[1] / "results"
#: Every accurate site runs FP8, however fast, and no probes after the plan: quality is asked.
QUALITY = {"min_speedup": 0.0, "tune": "never", "probe_every": 0}


def parser(doc: str | None, figure: str, seeds: int, data: bool = True) -> argparse.ArgumentParser:
    """data: it is the user's to choose."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    made.set_defaults(data=None, label=None)
    if data:
        made.add_argument("--data", required=True, help="kuairand:DIR, or another source")
        made.add_argument("--label", default=None)
    made.add_argument("--seeds", type=int, default=seeds)
    made.add_argument("--jobs", type=int, default=1, help="processes, shared by the cases")
    made.add_argument("--device", default="auto")
    made.add_argument("--batch", type=int, default=512)
    made.add_argument("--limit", type=int, default=None, help="rows, for a short run on a CPU")
    made.add_argument("--time-limit", type=float, default=None, help="seconds in all")
    made.add_argument("--work", type=Path, default=Path("loka-paper") / figure)
    made.add_argument("--out", type=Path, default=RESULTS / f"{figure}.json")
    return made


def study(
    args: argparse.Namespace, name: str, arms: Sequence[str], budget: float | None, **change: Any
) -> dict[str, Any]:
    """Run (or go on with) one study and summarise what is there."""
    config = StudyConfig(
        data=args.data,
        label=args.label,
        batch=args.batch,
        limit=args.limit,
        device=args.device,
        arms=tuple(arms),
        **change,
    )
    units = [Unit(seed, arm) for seed in range(args.seeds) for arm in arms]
    faults = run_units(args.work / name, config, units, args.jobs, budget)
    result = summarise(args.work / name, config, range(args.seeds))
    missing = [u for u in units if not u.path(args.work / name).exists()]
    result["missing"] = [f"{u.arm}, seed {u.seed}" for u in missing]
    result["faults"] = faults
    # Hundreds of sites say little here; the share of FP8 stands beside each figure.
    result.pop("sites", None)
    return result


def run_cases(
    args: argparse.Namespace,
    cases: Mapping[str, tuple[str, Sequence[str], dict[str, Any]]],
    done: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Several studies, name -> (folder, arms, how); with several --jobs all at the same time.

    ``done`` hears all results so far after each, in the order of ``cases``. A study that found no
    time for a single unit is left out; another run goes on with it.
    """
    end = None if args.time_limit is None else time.time() + args.time_limit
    together = len(cases) if args.jobs >= 2 * len(cases) else 1
    own = argparse.Namespace(**{**vars(args), "jobs": args.jobs // together})

    def one(name: str) -> dict[str, Any]:
        folder, arms, how = cases[name]
        return study(own, folder, arms, None if end is None else end - time.time(), **how)

    found: dict[str, Any] = {}
    with ThreadPoolExecutor(together) as pool:
        futures = {pool.submit(one, name): name for name in cases}
        for future in as_completed(futures):
            try:
                found[futures[future]] = future.result()
            except Exception as e:  # the other studies must not be lost
                print(f"{futures[future]}: {type(e).__name__}: {e}")
                continue
            done({name: found[name] for name in cases if name in found})
    return {name: found[name] for name in cases if name in found}


def between(
    args: argparse.Namespace, variant: tuple[str, str], base: tuple[str, str], like: dict[str, Any]
) -> dict[str, Any] | None:
    """Two arms, each (study, arm), in high precision from the first row on; None without pairs."""
    cuts = metrics.windows(like["data"]["rows"], like["config"]["windows"])
    pairing = Pairing(variant[1], base[1], cuts, like["config"]["eval_from"])
    for seed in range(args.seeds):
        paths = [Unit(seed, arm).path(args.work / name) for name, arm in (variant, base)]
        if all(p.exists() for p in paths):
            pairing.add(seed, *(load_trace(p)[0] for p in paths))
    return pairing.result() if pairing.pairs else None


def against_original(one: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Arm -> its pairing with the original; loka's own base is bf16_mods, and its name says so."""
    arms = {**(one.get("against_original") or {}), "bf16_mods": one.get("modelling")}
    if one.get("pairs"):
        arms["loka (against bf16_mods)"] = one
    return {arm: pairing for arm, pairing in arms.items() if pairing}


def measured(cases: Mapping[str, Mapping[str, dict[str, Any]]]) -> dict[str, Any]:
    """What stands beside the paper's figures: case -> arm -> mean, worst window, seeds lost."""

    def short(pairing: dict[str, Any]) -> dict[str, Any]:
        means = []
        for i in range(len(pairing["pairs"][0]["windows"])):
            values = [p["windows"][i]["rll_percent"] for p in pairing["pairs"]]
            if None not in values and pairing["pairs"][0]["windows"][i]["plan_active"]:
                means.append(sum(values) / len(values))
        return {
            "rll_percent": pairing["mean"],
            "ci95": pairing["ci95"],
            "worst_window_mean": max(means, default=None),
            "seeds_not_finite": pairing["without_figure"],
        }

    return {case: {arm: short(p) for arm, p in arms.items()} for case, arms in cases.items()}


def write(
    args: argparse.Namespace,
    paper: dict[str, Any],
    studies: dict[str, Any],
    cases: Mapping[str, Mapping[str, dict[str, Any]]] | None = None,
    **more: Any,
) -> None:
    """One file: what the paper reported, what was measured, on what; and its plot beside it.

    cases: panel -> arm -> pairing, what the plot shows; by default each arm against the original.
    """
    shown = cases or {name: against_original(one) for name, one in studies.items()}
    shown = {name: arms for name, arms in shown.items() if arms}
    first = next(iter(studies.values()))
    result = {"env": first["env"], "paper": paper, "measured": measured(shown), **more}
    write_text(
        args.out, json.dumps({**result, "studies": studies}, indent=1, allow_nan=False) + "\n"
    )
    print(f"saved {args.out}")
    if shown:
        title = f"{args.out.stem}, {first['data']['source']}, {first['env']['device']}"
        print(f"saved {draw(shown, title, paper['note'], args.out)}")
    for case, arms in result["measured"].items():
        for arm, one in arms.items():
            print(f"  {case}: {arm}: {one['rll_percent']} {one['ci95']}")
