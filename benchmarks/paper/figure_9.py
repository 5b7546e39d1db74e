"""Figure 9 (top): which Mods uniform FP8 needs. FP8 alone, with one Mod each, with all.

    python benchmarks/paper/figure_9.py --data kuairand:DIR --jobs 8

TorchAO's tensorwise recipe in all three directions on every linear with both sides >= 128, no gate,
on the stress variant with raw counts. Against the original in bf16; `loka` chooses per site.
"""

from __future__ import annotations

from quality_figure import parser
from quality_figure import study
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


def main() -> None:
    args = parser(__doc__, "figure_9", seeds=4).parse_args()
    options = {"min_speedup": 0.0, "tune": "never", "probe_every": 0}
    found = study(
        args, "stress", ARMS, args.time_limit, scale="stress", dense="raw", options=options
    )
    write(args, PAPER, {"stress, raw counts": found})


if __name__ == "__main__":
    main()
