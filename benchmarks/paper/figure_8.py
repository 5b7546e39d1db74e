"""Figure 8: BlockNorm's block size, 64 to 512 features and the whole row.

    python benchmarks/paper/figure_8.py --data kuairand:DIR --label is_click --jobs 20
    python benchmarks/paper/figure_8.py --data kuairand:DIR --scale tiny --limit 30720   # a CPU

BF16 with all Mods, one study per block size, the same seeds in each; RLL against the whole row. The
figure is about widths over the block: at `tiny` few layers have them, `small` is 1024 wide.
"""

from __future__ import annotations

from typing import Any

from quality_figure import QUALITY
from quality_figure import between
from quality_figure import parser
from quality_figure import run_cases
from quality_figure import write

PAPER = {
    "model": "Wukong, production scale",
    "note": "256 and 512 converge as RMSNorm over the whole row does",
}
WHOLE = 1 << 20
BLOCKS = (WHOLE, 64, 128, 256, 512)


def name_of(block: int) -> str:
    return "whole row" if block == WHOLE else f"block {block}"


def main() -> None:
    made = parser(__doc__, "figure_8", seeds=8)
    made.add_argument("--scale", default="small")
    args = made.parse_args()
    cases = {}
    for block in BLOCKS:
        how = {"scale": args.scale, "options": {**QUALITY, "block": block}}
        cases[name_of(block)] = (f"{args.scale}-block-{block}", ("bf16_mods",), how)

    def done(found: dict[str, Any]) -> None:
        arms = {}
        for block in BLOCKS[1:]:
            one = found.get(name_of(block))
            if one is None or name_of(WHOLE) not in found:
                continue
            folders = [(f"{args.scale}-block-{b}", "bf16_mods") for b in (block, WHOLE)]
            pair = between(args, folders[0], folders[1], one)
            one["against_whole_row"] = pair and {
                **pair,
                "variant": name_of(block),
                "base": name_of(WHOLE),
            }
            if pair:
                arms[name_of(block)] = pair
        write(args, PAPER, found, {f"wukong {args.scale}, against the whole row": arms})

    run_cases(args, cases, done)


if __name__ == "__main__":
    main()
