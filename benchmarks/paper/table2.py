r"""Table II: MERE of low-precision kernels on standard normal and on learned inputs, four linears.

    python benchmarks/paper/table2.py --data DIR --out benchmarks/results/table2.json

Geometric mean over four linears of a Wukong trained on KuaiRand of the plain MERE over 50
input-weight pairs, forward, fast accumulation where the recipe has it. Learned: the Probe's rows
and the trained weight; `gaussian`: the paper's own distribution model. Kernels that run on the
device are real, others emulated. The plain MERE grows with the number of outputs (it has no finite
mean), so values compare within this table only; `rel_bf16` divides that out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from loka_compile.lowering import gemm
from loka_compile.lowering.libraries import kernel_names
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.probe import quantify as qt
from paper import table5
from paper import trained as tr

SITES = ("layers.0.fmb.mlp.0", "layers.0.fmb.mlp.3", "layers.1.fmb.mlp.3", "head.0")
MODELS = ("standard_normal", "gaussian", "reservoir")


def real(kernel: str, device: torch.device) -> bool:
    return kernel == HIGH_PRECISION or split_kernel_name(kernel)[0].why_unavailable(device) is None


def offered(kernel: str, site: tr.Site) -> bool:
    if kernel == HIGH_PRECISION:
        return True
    library, recipe, _ = split_kernel_name(kernel)
    shape = GemmShape(256, site.w.shape[1], site.w.shape[0])
    return library.why_not(recipe, "fwd", shape) is None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", default="tiny")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    device = torch.device(args.device)
    one = tr.train("wukong", "log", args.scale, args.data, args.steps, 8)
    sites = [s for s in tr.record(one, one.later) if s.name in SITES]
    rows: list[dict[str, Any]] = []
    for kernel in (HIGH_PRECISION, *kernel_names()):
        name = kernel if real(kernel, device) else kernel + EMULATED
        for model in MODELS:
            values = []
            for site in sites:
                if not offered(kernel, site):
                    continue
                x, _ = tr.statistics_of(site, list(range(len(site.x))))
                found = []
                for i, sample in enumerate(
                    qt.draw(x, None, torch.bfloat16, args.pairs, model=model)
                ):
                    w = site.w.to(device, torch.bfloat16)
                    if model == "standard_normal":
                        w = torch.randn(w.shape, generator=torch.Generator().manual_seed(i)).to(w)
                    rows_x = sample.x.to(device)
                    amax = (sample.x_amax.to(device), None)
                    out = gemm.forward(rows_x, w, name, amax=amax)
                    found.append(table5.mere(out, rows_x.float() @ w.float().t()))
                values.append(sum(found) / len(found))
            if values:
                value = math.exp(sum(math.log(v) for v in values) / len(values))
                rows.append(
                    {"kernel": kernel, "real": name == kernel, "inputs": model, "mere": value}
                )
    bf16 = {r["inputs"]: r["mere"] for r in rows if r["kernel"] == HIGH_PRECISION}
    for row in rows:
        row["rel_bf16"] = row["mere"] / bf16[row["inputs"]]
    result = {
        "env": tr.environment(args.device),
        "config": {k: str(v) for k, v in vars(args).items() if k not in ("data", "out")},
        "sites": [s.name for s in sites],
        "table": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(f"{row['kernel']:<32} {row['inputs']:<16} {row['mere']:.3f} {row['rel_bf16']:.1f}")


if __name__ == "__main__":
    main()
