"""Figure 8: BlockNorm's block size, 64 to 512 features and the whole row.

    python benchmarks/paper/figure_8.py --data kuairand:DIR --scale small --jobs 8

BF16 with all Mods, one study per block size, the same seeds in each; RLL against the whole row. The
figure is about widths over the block: at `tiny` few layers have them, `small` is 1024 wide.
"""

from __future__ import annotations

import time
from typing import Any

from quality_figure import parser
from quality_figure import study
from quality_figure import write

from loka_compile.train import metrics
from loka_compile.train.pairs import Pairing
from loka_compile.train.study import Unit
from loka_compile.train.study import load_trace

PAPER = {
    "model": "Wukong, production scale",
    "note": "256 and 512 converge as RMSNorm over the whole row does",
}
WHOLE = 1 << 20
BLOCKS = (WHOLE, 64, 128, 256, 512)


def against_whole(args: Any, block: int, cuts: list[tuple[int, int]], start: int) -> Any:
    pairing = Pairing(f"block {block}", "whole row", cuts, start)
    # Both arms run in high precision from the first row on.
    pairing.variant = "bf16_mods"
    for seed in range(args.seeds):
        paths = [Unit(seed, "bf16_mods").path(args.work / f"block-{b}") for b in (block, WHOLE)]
        if all(p.exists() for p in paths):
            pairing.add(seed, *(load_trace(p)[0] for p in paths))
    if not pairing.pairs:
        return None
    return {**pairing.result(), "variant": f"block {block}", "base": "whole row"}


def main() -> None:
    made = parser(__doc__, "figure_8", seeds=8)
    made.add_argument("--scale", default="small")
    args = made.parse_args()
    end = None if args.time_limit is None else time.time() + args.time_limit
    studies: dict[str, Any] = {}
    for block in BLOCKS:
        left = None if end is None else end - time.time()
        name = "whole row" if block == WHOLE else f"block {block}"
        found = study(
            args,
            f"block-{block}",
            ("bf16_mods",),
            left,
            scale=args.scale,
            options={"block": block},
        )
        cuts = metrics.windows(found["data"]["rows"], 10)
        if block != WHOLE:
            found["against_whole_row"] = against_whole(
                args, block, cuts, found["config"]["eval_from"]
            )
        studies[name] = found
        write(args, PAPER, studies)


if __name__ == "__main__":
    main()
