"""Figure 3, the quality half: uniform FP8 (TorchAO tensorwise, linears with both sides >= 128).

    python benchmarks/paper/figure_3.py --data kuairand:DIR --jobs 8

On the stress variant (raw or log counts as they are, biases, deeper), with and without norms in the
MLPs; `loka` is what the backend makes of the same model. Against the original in bf16, per window.
The throughput half is in figure_10.json (`torchao_tensorwise` beside `original`).
"""

from __future__ import annotations

import time

from quality_figure import parser
from quality_figure import study
from quality_figure import write

PAPER = {
    "model": "Wukong, production scale",
    "hardware": "64 H100",
    "rll_percent": 2.5,
    "note": "up to 2.5 % worse and 1.3x slower",
}
#: name -> scale, form of the dense values
CASES = {
    "tiny, standardised": ("tiny", "standard"),
    "stress, raw counts": ("stress", "raw"),
    "stress without norms, log counts": ("stress-no-norm", "log"),
}
ARMS = ("original", "fp8", "bf16_mods", "loka")


def main() -> None:
    args = parser(__doc__, "figure_3", seeds=4).parse_args()
    end = None if args.time_limit is None else time.time() + args.time_limit
    studies = {}
    for name, (scale, dense) in CASES.items():
        left = None if end is None else end - time.time()
        options = {"min_speedup": 0.0, "tune": "never", "probe_every": 0}
        folder = f"{scale}-{dense}"
        studies[name] = study(args, folder, ARMS, left, scale=scale, dense=dense, options=options)
        write(args, PAPER, studies)


if __name__ == "__main__":
    main()
