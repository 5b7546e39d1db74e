"""200 training steps of Wukong on KuaiRand with real FP8 kernels, against BF16 with the same Mods.

    python benchmarks/bench_train_h200.py --data DIR --out benchmarks/results/train_h200.json

Arms, from one initialisation and one batch order, FP32 parameters, bf16 autocast:
    bf16_mods  apply_mods(model) under plain Inductor, on the GPU
    loka       the model as written, backend="loka", mods on, torch._scaled_mm for every site that
               the accuracy gate lets through (no speed gate: this is the quality of real kernels)
    loka_cpu   the same on the CPU with emulated FP8, first step only
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import time
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import loka_compile
from loka_compile import _compat
from loka_compile.data.registry import open_source
from loka_compile.zoo.wukong import Wukong
from loka_compile.zoo.wukong import WukongConfig


def run(
    model: Wukong, compiled: Any, batches: list[Any], device: torch.device, lr: float
) -> dict[str, Any]:
    """Losses per step and milliseconds per steady step of one arm."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses, milliseconds = [], []
    for batch in batches:
        ids, dense, label = (t.to(device) for t in (batch.categorical, batch.dense, batch.label))
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        embeddings = model.embedding(ids)
        with torch.autocast(device.type, torch.bfloat16):
            logits = compiled(embeddings, dense)
        loss = binary_cross_entropy_with_logits(logits.float(), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        milliseconds.append((time.perf_counter() - begun) * 1e3)
    steady = sorted(milliseconds[20:]) or milliseconds
    return {"losses": losses, "median_ms": steady[len(steady) // 2]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder with the KuaiRand parquet files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", default="small")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()

    device = torch.device(args.device)
    real = _compat.why_no_fp8(device) is None
    source = open_source(f"kuairand:{args.data}")
    batches = list(source.batches(args.batch, limit=args.batch * args.steps))
    torch.manual_seed(0)
    model = Wukong(
        WukongConfig.of(args.scale), source.schema.cardinalities, len(source.schema.dense)
    )
    options = {"mods": "on", "emulate": not real, "min_speedup": 0.0, "tune": "never"}

    arms: dict[str, Any] = {}
    own = copy.deepcopy(model).to(device)
    loka_compile.apply_mods(own.dense)
    arms["bf16_mods"] = run(own, torch.compile(own.dense), batches, device, args.lr)

    torch._dynamo.reset()
    own = copy.deepcopy(model).to(device)
    with loka_compile.explain() as report:
        compiled = torch.compile(own.dense, backend="loka", options=options)
        arms["loka"] = run(own, compiled, batches, device, args.lr)

    torch._dynamo.reset()
    own = copy.deepcopy(model)
    compiled = torch.compile(own.dense, backend="loka", options={**options, "emulate": True})
    arms["loka_cpu"] = run(own, compiled, batches[:1], torch.device("cpu"), args.lr)

    def mean(name: str) -> float:
        late = arms[name]["losses"][args.steps // 2 :]
        return sum(late) / len(late)

    first = arms["loka"]["losses"][0]
    result = {
        "env": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": _compat.device_key(device),
            "date": datetime.now(timezone.utc).date().isoformat(),
            "real_fp8": real,
        },
        "config": {k: str(v) for k, v in vars(args).items() if k not in ("data", "out")},
        "finite": all(map(math.isfinite, arms["loka"]["losses"])),
        "step1_vs_cpu_percent": 100 * abs(first / arms["loka_cpu"]["losses"][0] - 1),
        "late_mean_vs_bf16_percent": 100 * (mean("loka") / mean("bf16_mods") - 1),
        "arms": arms,
        "sites": report.sites,
        "notes": [note for graph in report.graphs for note in graph.notes],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print({k: v for k, v in result.items() if k not in ("arms", "sites")})
    for row in report.sites:
        kernels = {d: c["kernel"] for d, c in row["directions"].items()}
        print(row["name"], row["M"], row["K"], row["N"], row["fused"], kernels)


if __name__ == "__main__":
    main()
