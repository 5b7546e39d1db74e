"""Figure 9 (top): which Mods uniform FP8 needs. FP8 alone, with one Mod each, with all.

    python benchmarks/paper/figure_9.py --data kuairand:DIR --label is_click --jobs 18
    python benchmarks/paper/figure_9.py --data kuairand:DIR --cases norms --limit 30720  # a CPU

TorchAO's tensorwise recipe in all three directions on every linear with both sides >= 128, no gate,
on stress variants: deeper, biases on; `norms`: raw counts, a LayerNorm in every layer of the MLPs;
`no-norms`: log counts, neither scaled nor clipped, into MLPs without norms, wide enough to be FP8
themselves (from raw counts such a model learns nothing in any precision). Against the original in
bf16; `loka` chooses per site.
"""

from __future__ import annotations

from quality_figure import QUALITY
from quality_figure import parser
from quality_figure import run_cases
from quality_figure import write

PAPER = {
    "model": "Wukong, production scale",
    "hardware": "H100",
    "note": "no Mod alone is stable; with all three the curve stays within about +-0.01 %",
}
ARMS = (
    "original",
    "fp8",
    "fp8_no_bias",
    "fp8_block_norm",
    "fp8_hard_swish",
    "fp8_all_mods",
    "bf16_mods",
    "loka",
)
LR = 1e-3
#: name -> (title, scale, form of the dense values)
CASES = {
    "norms": ("stress, raw counts", "stress", "raw"),
    "no-norms": ("stress without norms, log counts", "stress-wide", "log"),
}


def main() -> None:
    made = parser(__doc__, "figure_9", seeds=4)
    made.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    args = made.parse_args()
    cases = {}
    for title, scale, dense in map(CASES.__getitem__, args.cases):
        how = {"scale": scale, "dense": dense, "lr": LR, "options": QUALITY}
        # Named as figure 3's: what one of them has run in the same --work, the other need not.
        cases[title] = (f"{scale}-{dense}-{LR:g}", ARMS, how)
    run_cases(args, cases, lambda found: write(args, PAPER, found))


if __name__ == "__main__":
    main()
