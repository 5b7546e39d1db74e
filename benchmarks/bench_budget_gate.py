r"""gate="budget" from end to end on trained models: what a budget buys, and whether it is kept.

    python benchmarks/bench_budget_gate.py --data DIR --out benchmarks/results/budget_gate.json

Models trained on KuaiRand in high precision go through the backend with several budgets. Per case:
forwards in FP8 and their share of the FLOPs, the predicted loss, the replay on one batch
that no probe saw, and the KL divergence from high precision on held-back rows (at least 32,768).
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from paper import trained as tr

import loka_compile
from loka_compile.options import PROBE_STEPS
from loka_compile.probe import likelihood

OPTIONS = {
    "mods": "on", "emulate": True, "inner": "eager", "probe_every": 0, "gate": "budget",
    "libraries": ("torch",), "recipes": ("tensorwise", "rowwise"),
    # The budget speaks of forwards, and each direction is measured on its own.
    "force": {"*": {"dgrad": "high_precision", "wgrad": "high_precision"}},
}  # fmt: skip


@torch.no_grad()
def run(model: Any, dense: Any, batches: list[Any]) -> Tensor:
    return torch.cat([tr.logits(model, dense, one) for one in batches])


def study(one: tr.Trained, budget: float, reference: Tensor) -> dict[str, Any]:
    probed, held_back = one.later[: PROBE_STEPS + 1], one.later[PROBE_STEPS + 1 :]
    # Copies are new parameters: nothing is known of them.
    model = copy.deepcopy(one.model)
    torch._dynamo.reset()
    options = {**OPTIONS, "loss_budget": budget}
    dense = torch.compile(model.dense, backend="loka", options=options)
    for batch in probed:
        tr.loss(model, dense, batch).backward()
    plan = loka_compile.plan_of(model.dense)
    chosen = [s for s in plan.sites.values() if s.choice("fwd").is_fp8]
    work = {s.name: 2 * s.M * s.K * s.N * s.count for s in plan.sites.values()}
    kl = likelihood.divergence(likelihood.LOGITS, reference, run(model, dense, held_back))
    found = {
        "model": one.name,
        "budget": budget,
        "sites": len(plan.sites),
        "fp8_forwards": len(chosen),
        "fp8_flops_share": sum(work[s.name] for s in chosen) / sum(work.values()),
        "predicted_nats": plan.predicted_nats,
        "replayed_nats": plan.replayed_nats,
        "true_nats": float(kl.mean()),
        "held_back_rows": kl.numel(),
        "predicted": {s.name: s.choice("fwd").nats for s in plan.sites.values()},
    }
    print({k: v for k, v in found.items() if k != "predicted"}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", default="tiny")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--held-back", type=int, default=64, help="batches that give the truth")
    parser.add_argument("--budgets", default="1e-3,1e-4,1e-5,3e-6,1e-6", help="nats")
    parser.add_argument("--counts", default="log", help="log or raw")
    parser.add_argument("--models", default="wukong,dcn_v2")
    args = parser.parse_args()

    rows: list[dict[str, Any]] = []
    for kind in args.models.split(","):
        later = PROBE_STEPS + 1 + args.held_back
        one = tr.train(kind, args.counts, args.scale, args.data, args.steps, later)
        dense = tr.in_high_precision(one.model, probe_every=0)
        reference = run(one.model, dense, one.later[PROBE_STEPS + 1 :])
        rows += [study(one, float(budget), reference) for budget in args.budgets.split(",")]
    kept = [r for r in rows if r["fp8_forwards"]]
    result = {
        "env": tr.environment(),
        "config": {k: str(v) for k, v in vars(args).items() if k not in ("data", "out")},
        "within_budget": sum(r["true_nats"] <= r["budget"] for r in kept),
        "assignments": len(kept),
        "rank_predicted_true": float(
            spearmanr([r["predicted_nats"] for r in kept], [r["true_nats"] for r in kept]).statistic
        ),
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
