"""Figure 8: BlockNorm's block size, 64 to 512 features and the whole row.

    python benchmarks/paper/figure_8.py --data kuairand:DIR --scale small --jobs 8

BF16 with all Mods, one study per block size, the same seeds in each; RLL against the whole row. The
figure is about widths over the block: at `tiny` few layers have them, `small` is 1024 wide.
"""

from __future__ import annotations

import time
from typing import Any

from quality_figure import between
from quality_figure import parser
from quality_figure import study
from quality_figure import write

PAPER = {
    "model": "Wukong, production scale",
    "note": "256 and 512 converge as RMSNorm over the whole row does",
}
WHOLE = 1 << 20
BLOCKS = (WHOLE, 64, 128, 256, 512)


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
        if block != WHOLE:
            arms = [(f"block-{b}", "bf16_mods") for b in (block, WHOLE)]
            pair = between(args, *arms, found)
            found["against_whole_row"] = pair and {**pair, "variant": name, "base": "whole row"}
        studies[name] = found
        write(args, PAPER, studies)


if __name__ == "__main__":
    main()
