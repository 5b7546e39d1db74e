"""The table of the README: each row is one question, and is left out where its file is missing."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import geometric_mean
from typing import Any

from results_page import read
from results_page import table
from results_paper import signed
from results_paper import span

MODELS = ("wukong", "interformer", "dhen", "dcn_v2")
#: (batch, mode, CUDA graphs): what is shown of the whole steps.
_STEPS = ((4096, "train", False), (4096, "inference", False), (1024, "train", True))


def headline() -> list[str]:
    rows = [*_steps(), *_kernel(), *_quality(), *_uniform(), *_probing()]
    return table(["question", "measured", "on"], rows)


def _steps() -> Iterator[list[str]]:
    data = read("dispatch_h200.json")
    if data is None:
        return
    ms: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in data["rows"]:
        if row["ms"] is not None and row["params"] == "bf16" and row["scale"] == "base":
            key = row["batch"], row["mode"], row["cuda_graphs"]
            ms.setdefault(key, {})[row["arm"]] = row["ms"]
    for batch, mode, graphs in _STEPS:
        arms = ms.get((batch, mode, graphs), {})
        if arms.keys() >= {"dispatch", "bf16_mods", "bf16_original"}:
            own = arms["dispatch"]
            what = "training step" if mode == "train" else "inference"
            under = ", CUDA graphs" if graphs else ""
            yield [
                f"{what} of Wukong `base`'s dense part, batch {batch}{under}",
                f"{own:.2f} ms; bf16 with the Mods {arms['bf16_mods']:.2f} "
                f"(**{arms['bf16_mods'] / own:.2f}x**), as written {arms['bf16_original']:.2f} "
                f"(**{arms['bf16_original'] / own:.2f}x**)",
                data["env"]["device"],
            ]


def _kernel() -> Iterator[list[str]]:
    data = read("fused_forward_h200.json")
    if data is None:
        return
    ratios = [
        r["bf16_layernorm_silu_us"] / min(r["fused_us"], r["fused_fp8_out_us"])
        for r in data["rows"]
        if r["M"] == 1024
    ]
    yield [
        f"fused Linear, BlockNorm, Hard Swish over compiled bf16 LayerNorm, SiLU; {len(ratios)} "
        "shapes, M = 1024",
        f"{min(ratios):.2f}x to {max(ratios):.2f}x, geometric mean "
        f"**{geometric_mean(ratios):.2f}x**",
        data["env"]["device"],
    ]


def _quality() -> Iterator[list[str]]:
    """Every model on the click log: what FP8 costs, and what the Mods do that it is judged with."""
    mods: list[str] = []
    for model in MODELS:
        data = read(f"quality_kuairand_{model}.json")
        if data is not None:
            mods.append(f"{model} {data['modelling']['mean']:+.3f} %")
            yield [
                f"loss of FP8 against bf16, both with the Mods: {model}, KuaiRand, "
                f"{len(data['pairs'])} seeds",
                f"**{signed(data['mean'])} %** ({span(data)})",
                _emulated(data["env"]),
            ]
    if mods:
        what = "what the Mods themselves change, in bf16: KuaiRand (each has a switch)"
        yield [what, ", ".join(mods), "CPU"]


def _uniform() -> Iterator[list[str]]:
    data = read("uniform_tail.json")
    if data is None:
        return
    studies = list(data["studies"].values())
    losses = [s["against_original"]["fp8"]["expected"]["mean"] for s in studies]
    ours = [s["expected"]["ci95"][1] for s in studies]
    yield [
        "counts of ever heavier tails, synthetic clicks: loss of FP8 on every wide linear, and of "
        "loka",
        f"{losses[0]:+.2f} % to **{losses[-1]:+.2f} %**; loka at most **{max(ours):+.3f} %** "
        "(upper bound)",
        _emulated(data["env"]),
    ]


def _probing() -> Iterator[list[str]]:
    data = read("probe_overhead_h200.json")
    if data is not None:
        yield [
            f"what probing takes of {data['steps']:,} training steps, Wukong `base`, batch 4096",
            f"{data['overhead_percent']:.2f} %",
            data["env"]["device"],
        ]


def _emulated(env: dict[str, Any]) -> str:
    return "CPU, FP8 emulated" if env["emulated"] else str(env["device"])
