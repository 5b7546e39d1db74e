"""What BlockNorm's blocks cost where no GEMM needs them: norms that no linear feeds.

    python benchmarks/paper/norm_blocks.py --data kuairand:DIR --device cuda --jobs 16 --seeds 64
    python benchmarks/paper/norm_blocks.py --data flights --name flights --device cuda --jobs 16

Blocks let a GEMM's tile hold what a norm needs. Wukong's `fmb.norm` reads products of embeddings,
which come out of no linear, so its blocks buy nothing; at `tiny` on KuaiRand it is 320 wide. Arms,
all in bf16 without the backend, from the same seeds on the same rows:
    original     biases, LayerNorm, SiLU
    mods_blocks  all Mods; that norm in blocks of the default width (256 + 64)
    mods_even    all Mods; that norm in equal blocks (2 x 160): is it the blocks or the ragged end
    mods_rows    all Mods; that norm over the whole row
All norms behind a linear have the default block in each arm. Studies of several --name add up in
one file; a study that was stopped goes on.
"""

from __future__ import annotations

import json

from quality_figure import between
from quality_figure import parser
from quality_figure import study
from quality_figure import write

PAPER = {
    "model": "Wukong, production scale",
    "note": "block sizes 256 and 512 train as RMSNorm over the whole row does",
}
ARMS = ("original", "mods_blocks", "mods_rows", "mods_even")


def main() -> None:
    made = parser(__doc__, "norm_blocks", seeds=16)
    made.add_argument("--name", default="kuairand", help="of this study in the file")
    made.add_argument("--model", default="wukong")
    made.add_argument("--scale", default="tiny")
    args = made.parse_args()
    folder = f"{args.name}-{args.model}-{args.scale}"
    shape = {"model": args.model, "scale": args.scale}
    found = study(args, folder, ARMS, args.time_limit, **shape)
    found["against_blocks"] = {
        arm: between(args, (folder, arm), (folder, "mods_blocks"), found)
        for arm in ("mods_rows", "mods_even")
    }
    studies = json.loads(args.out.read_text())["studies"] if args.out.exists() else {}
    write(args, PAPER, {**studies, f"{args.name}, {args.model} {args.scale}": found})
    for name, one in {**found["against_original"], **found["against_blocks"]}.items():
        if one:
            print(name, "against", one["base"], "mean", one["mean"], "95 %", one["ci95"])


if __name__ == "__main__":
    main()
