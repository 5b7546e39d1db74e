r"""Does the Gauss-Newton score rank sites by the harm of FP8 there? Predicted against true KL.

    python benchmarks/bench_budget_rank.py --data DIR --out benchmarks/results/budget_rank.json

Models trained on KuaiRand in high precision. Scores come from a few probed batches; the truth is
the KL divergence between the model and itself with one site's forward switched to one recipe, on
held-back rows (at least 32,768). Then an assignment within a loss budget, and its true KL as a
whole. `spearman`: of the logit score; `spearman_state`: of the score that needs no extra backward.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from paper import trained as tr

from loka_compile.lowering import formulas
from loka_compile.lowering import gemm
from loka_compile.lowering.recipes import EMULATED
from loka_compile.probe import gauss_newton as gn

WANTED = ("torch:tensorwise", "torch:rowwise", "deep_gemm:blockwise")


class Switch:
    """Runs the forward GEMM of chosen sites by other kernels: {site: kernel}."""

    def __init__(self, sites: list[tr.Site]) -> None:
        self.sites = sites
        self.kernels: dict[str, str] = {}
        self._order: list[str | None] = []
        self._call = 0
        self._learning = True

    def forward(self, x: Tensor, w: Tensor, kernel: str, *rest: Any, **named: Any) -> Tensor:
        if self._learning:
            self._order.append(self._name(w))
            return gemm.forward(x, w, kernel, *rest, **named)
        name = self._order[self._call % len(self._order)]
        self._call += 1
        return gemm.forward(x, w, self.kernels.get(name or "", kernel), *rest, **named)

    def _name(self, w: Tensor) -> str | None:
        taken = set(self._order)
        for site in self.sites:
            if (
                site.w.shape == w.shape
                and site.name not in taken
                and torch.equal(site.w.to(w.dtype), w)
            ):
                return site.name
        return None

    def learnt(self) -> None:
        self._learning = False
        missing = {s.name for s in self.sites} - set(self._order)
        if missing:
            raise RuntimeError(f"no forward GEMM found for {', '.join(sorted(missing))}")


@contextmanager
def switched(switch: Switch) -> Iterator[None]:
    class Gemm:
        forward = staticmethod(switch.forward)
        dgrad = staticmethod(gemm.dgrad)
        wgrad = staticmethod(gemm.wgrad)

    before = formulas.gemm
    formulas.gemm = Gemm
    try:
        yield
    finally:
        formulas.gemm = before


def bernoulli_kl(a: Tensor, b: Tensor) -> float:
    """mean KL(sigmoid(a) || sigmoid(b)), from logits, in FP64."""
    a, b = a.double(), b.double()
    p = a.sigmoid()
    softplus = torch.nn.functional.softplus
    each = p * (softplus(-b) - softplus(-a)) + (1 - p) * (softplus(b) - softplus(a))
    return float(each.mean())


def _spearman(a: list[float], b: list[float]) -> float:
    return float(spearmanr(a, b).statistic)


def study(one: tr.Trained, probed: int, budget: float) -> dict[str, Any]:
    kernels = list(WANTED)
    jacobians = tr.record(one, one.later[:probed], of_logits=True)
    rows = len(one.later[0])
    of_loss = {s.name: s for s in tr.record(one, one.later[:probed])}
    dense = tr.in_high_precision(one.model, probe_every=0)
    with torch.no_grad():
        probabilities = [tr.logits(one.model, dense, b).sigmoid() for b in one.later[:probed]]
    cases: list[dict[str, Any]] = []
    for site in jacobians:
        x, gy = tr.statistics_of(of_loss[site.name], list(range(probed)))
        for kernel in kernels:
            name = kernel + EMULATED
            scores = [
                gn.logit_score(name, site.w, site.x[i], site.gy[i], probabilities[i])
                for i in range(probed)
            ]
            state = gn.state_score(
                name, site.w, x, gy, site.x[0].dtype, samples=rows, rows=site.x[0].shape[0]
            )
            cases.append(
                {
                    "site": site.name,
                    "recipe": kernel,
                    "predicted_kl": sum(scores) / probed,
                    "predicted_kl_state": state,
                    "flops": 2 * site.w.numel() * site.x[0].shape[0] // rows,
                }
            )
    held_back = one.later[probed:]
    inputs = [one.model.inputs(b.categorical, b.dense) for b in held_back]
    inputs = [tuple(t.detach() for t in i) for i in inputs]

    def run() -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return torch.cat([dense(*i).float().reshape(-1) for i in inputs])

    switch = Switch(jacobians)
    with switched(switch):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            dense(*inputs[0])
        switch.learnt()
        reference = run()
        for case in cases:
            switch.kernels = {case["site"]: case["recipe"] + EMULATED}
            case["true_kl"] = bernoulli_kl(reference, run())
        scores = {s.name: {} for s in jacobians}
        gains = {s.name: {} for s in jacobians}
        for case in cases:
            scores[case["site"]][case["recipe"]] = case["predicted_kl"]
            gains[case["site"]][case["recipe"]] = float(case["flops"])
        chosen = gn.within_budget(scores, gains, budget)
        switch.kernels = {s: k + EMULATED for s, k in chosen.items()}
        whole = bernoulli_kl(reference, run())
        switch.kernels = {s.name: kernels[-1] + EMULATED for s in jacobians}
        everywhere = bernoulli_kl(reference, run())
    true = [c["true_kl"] for c in cases]
    ratio = sorted(c["predicted_kl"] / c["true_kl"] for c in cases if c["true_kl"] > 0)
    return {
        "model": one.name,
        "held_back_rows": reference.numel(),
        "probed_rows": probed * rows,
        "spearman": _spearman([c["predicted_kl"] for c in cases], true),
        "spearman_state": _spearman([c["predicted_kl_state"] for c in cases], true),
        "predicted_over_true_median": ratio[len(ratio) // 2] if ratio else math.nan,
        "budget": budget,
        "assignment": chosen,
        "assignment_predicted_kl": sum(scores[s][k] for s, k in chosen.items()),
        "assignment_true_kl": whole,
        "assignment_flops_share": sum(gains[s][k] for s, k in chosen.items())
        / sum(max(g.values()) for g in gains.values()),
        f"everywhere_{kernels[-1]}_true_kl": everywhere,
        "cases": cases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", default="tiny")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--probed", type=int, default=8, help="batches of 512 that give the scores")
    parser.add_argument("--held-back", type=int, default=64, help="batches that give the truth")
    parser.add_argument("--budget", type=float, default=1e-5, help="nats")
    parser.add_argument("--counts", default="log", help="log or raw")
    parser.add_argument("--models", default="wukong,dcn_v2")
    args = parser.parse_args()

    models = []
    for kind in args.models.split(","):
        later = args.probed + args.held_back
        one = tr.train(kind, args.counts, args.scale, args.data, args.steps, later)
        models.append(study(one, args.probed, args.budget))
        print({k: v for k, v in models[-1].items() if k != "cases"}, flush=True)
    result = {
        "env": tr.environment(),
        "config": {k: str(v) for k, v in vars(args).items() if k not in ("data", "out")},
        "spearman": {m["model"]: m["spearman"] for m in models},
        "spearman_state": {m["model"]: m["spearman_state"] for m in models},
        "models": models,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
