"""What each Mod costs or gains by itself, in BF16: the modelling question, taken apart.

    python benchmarks/paper/each_mod.py --data kuairand:DIR --label is_click --model dhen --jobs 16

Arms, without the backend, from the same seeds on the same rows: the original; no bias, BlockNorm
and Hard Swish each alone (`apply_mods(model, mods=(name,))`: biases of norms are biases); all Mods;
with --keep, all Mods but in the layers that it names: --keep 'no_bias=layers.*.mlp.0'. Studies of
several models and --name add up in one file; a study that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from quality_figure import QUALITY
from quality_figure import between
from quality_figure import parser
from quality_figure import run_cases
from quality_figure import write

from loka_compile.commands.mods_flags import options_of

PAPER = {
    "model": "Wukong, production scale",
    "note": "the Mods are said to leave quality as it is",
}
ARMS = ("original", "bf16_no_bias", "bf16_block_norm", "bf16_hard_swish", "bf16_mods")


def main() -> None:
    made = parser(__doc__, "each_mod", seeds=8)
    made.add_argument("--name", default="kuairand", help="of this study in the file")
    made.add_argument("--model", default="wukong")
    made.add_argument("--scale", default="tiny")
    made.add_argument("--keep", action="append", help="MOD=LAYER, as of loka compare")
    args = made.parse_args()
    # Units of before `no_bias` held the biases of norms stand in a folder without this ending.
    folder = f"{args.name}-{args.model}-{args.scale}-each"
    how = {"model": args.model, "scale": args.scale}
    cases = {folder: (folder, ARMS, how)}
    kept = None
    if args.keep:
        kept = f"{folder}-{'-'.join(args.keep)}".translate(str.maketrans("*?/=", "____"))
        own = {"options": {**QUALITY, **options_of(None, args.keep)}}
        cases[kept] = (kept, ("bf16_mods",), {**how, **own})

    def done(found: dict[str, Any]) -> None:
        if folder in found:
            save(args, found[folder], folder, kept if kept in found else None)

    run_cases(args, cases, done)


def save(args: argparse.Namespace, found: dict[str, Any], folder: str, kept: str | None) -> None:
    """kept: the study in which some layers are kept, once it has run."""
    base = (folder, "original")
    found["against_original"] = {arm: between(args, (folder, arm), base, found) for arm in ARMS[1:]}
    if kept is not None:
        name = f"bf16_mods, {' '.join(args.keep)} kept"
        pair = between(args, (kept, "bf16_mods"), base, found)
        found["against_original"][name] = pair and {**pair, "variant": name}
    # What has no such entry was measured when those went with BlockNorm.
    found["biases_of_norms"] = "no_bias"
    studies = json.loads(args.out.read_text())["studies"] if args.out.exists() else {}
    write(args, PAPER, {**studies, f"{args.name}, {args.model} {args.scale}": found})
    for name, one in found["against_original"].items():
        if one:
            print(name, "against", one["base"], "mean", one["mean"], "95 %", one["ci95"])


if __name__ == "__main__":
    main()
