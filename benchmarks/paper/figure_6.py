"""Figure 6: how the norms of biases behave over training, with the Mods off.

    python benchmarks/paper/figure_6.py --data kuairand:DIR

The original model; the L2 norm of every linear's bias, every 10 steps, and what it does:
`converges` (moves less than 5 % over the last third), `grows` or `shrinks` (moves one way all
through the last third), `wanders` (the rest). torch starts a bias at a norm of about
sqrt(N / 3K), so a norm says nothing without the one it started from.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from datetime import datetime
from datetime import timezone
from pathlib import Path

import numpy as np
import torch
from torch import nn

from loka_compile.files import write_text
from loka_compile.train.arms import Arm
from loka_compile.train.environment import versions
from loka_compile.train.loop import LoopSettings
from loka_compile.train.loop import run_arm
from loka_compile.train.study import StudyConfig
from loka_compile.zoo import build_model

RESULTS = Path(__file__).parents[1] / "results"
EVERY = 10
PAPER = {
    "model": "Wukong, production scale",
    "note": "a large part of the biases never converges; some norms reach 0.1 and more",
}


def classify(norms: np.ndarray) -> str:
    """float ``[points]`` -> what the curve does over its last third."""
    last = norms[-max(3, len(norms) // 3) :]
    scale = max(float(np.abs(last).mean()), 1e-12)
    if float(np.ptp(last)) < 0.05 * scale:
        return "converges"
    # Thirds of the last third, so that one step back does not count.
    parts = np.diff([p.mean() for p in np.array_split(last, 3)])
    if (parts > 0).all():
        return "grows"
    return "shrinks" if (parts < 0).all() else "wanders"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--label", default=None)
    parser.add_argument("--scale", default="stress")
    parser.add_argument("--dense", default="raw")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "figure_6.json")
    args = parser.parse_args()

    config = StudyConfig(
        data=args.data, label=args.label, dense=args.dense, scale=args.scale, device=args.device
    )
    device, source = config.torch_device(), config.open()
    torch.manual_seed(args.seed)
    model = build_model("wukong", args.scale, source.schema, shared_table=True).to(device)
    linears = [(n, m) for n, m in model.dense.named_modules() if isinstance(m, nn.Linear)]
    biases = {n: m.bias for n, m in linears if m.bias is not None}
    norms: list[torch.Tensor] = []
    steps: list[int] = []
    done = 0

    def record(rows: int) -> None:
        nonlocal done
        if done % EVERY == 0:
            with torch.no_grad():
                norms.append(torch.stack([b.norm() for b in biases.values()]).cpu())
            steps.append(done)
        done += 1

    # Eager: a compiled step would read the same, and nothing is timed here.
    batches = source.batches(config.batch, args.limit)
    run_arm(Arm("original", model, model.dense), batches, LoopSettings(device), record)
    curves = torch.stack(norms).double().numpy()
    kinds = {name: classify(curves[:, i]) for i, name in enumerate(biases)}
    result = {
        "env": {**versions(device), "date": datetime.now(timezone.utc).date().isoformat()},
        "config": {"scale": args.scale, "dense": args.dense, "seed": args.seed, "every": EVERY},
        "data": {"source": source.name, "rows": source.counts.emitted},
        "paper": PAPER,
        "counts": dict(Counter(kinds.values())),
        "moved_by_half": int((np.abs(curves[-1] / curves[0] - 1) > 0.5).sum()),
        "at_least_0.1": int((curves[-1] >= 0.1).sum()),
        "biases": {
            name: {
                "kind": kinds[name],
                "first": float(curves[0, i]),
                "last": float(curves[-1, i]),
                "largest": float(curves[:, i].max()),
                "norms": [round(float(v), 5) for v in curves[:: max(1, len(curves) // 40), i]],
            }
            for i, name in enumerate(biases)
        },
    }
    write_text(args.out, json.dumps(result, indent=1) + "\n")
    print(result["counts"], f"norms of 0.1 and more: {result['at_least_0.1']}", f"saved {args.out}")


if __name__ == "__main__":
    main()
