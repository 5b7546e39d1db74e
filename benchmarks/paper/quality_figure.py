"""What the quality figures share: studies over paired seeds, written with what the paper has."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loka_compile.files import write_text
from loka_compile.train import metrics
from loka_compile.train.pairs import Pairing
from loka_compile.train.pairs import summarise
from loka_compile.train.study import StudyConfig
from loka_compile.train.study import Unit
from loka_compile.train.study import load_trace
from loka_compile.train.study import run_units

RESULTS = Path(__file__).parents[1] / "results"


def parser(doc: str | None, figure: str, seeds: int) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--data", required=True, help="kuairand:DIR, or another source")
    made.add_argument("--label", default=None)
    made.add_argument("--seeds", type=int, default=seeds)
    made.add_argument("--jobs", type=int, default=1)
    made.add_argument("--device", default="auto")
    made.add_argument("--batch", type=int, default=512)
    made.add_argument("--limit", type=int, default=None)
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


def write(args: argparse.Namespace, paper: dict[str, Any], studies: dict[str, Any]) -> None:
    """One file: what the paper reported, what was measured, on what."""
    first = next(iter(studies.values()))
    result = {"env": first["env"], "paper": paper, "studies": studies}
    write_text(args.out, json.dumps(result, indent=1, allow_nan=False) + "\n")
    print(f"saved {args.out}")
