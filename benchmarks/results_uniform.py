"""Sections of docs/results.md about uniform FP8: where it loses; each is empty without its file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from results_charts import shown
from results_page import read
from results_page import table
from results_page import where
from results_paper import signed
from results_paper import span


def stress() -> list[str]:
    lines: list[str] = []
    for figure, title in (
        ("figure_3", "Figure 3: uniform FP8 on every wide linear"),
        ("figure_9", "Figure 9: which Mods uniform FP8 needs"),
    ):
        data = read(f"{figure}.json")
        if data is None:
            continue
        lines += [
            f"## {title}",
            "",
            f"`benchmarks/paper/{figure}.py`; {where(data['env'])}. The paper "
            f"({data['paper']['model']}, {data['paper']['hardware']}): {data['paper']['note']}.",
            "RLL in percent against the original in bf16, paired by seed"
            + ("; FP8 is emulated." if data["env"]["emulated"] else "."),
            "",
        ]
        rows, fp8 = [], []
        for name, study in data["studies"].items():
            arms = {**(study.get("against_original") or {}), "bf16_mods": study.get("modelling")}
            for arm, one in arms.items():
                if one:
                    lost = one["without_figure"]
                    exploded = f"; {lost} seeds not finite" if lost else ""
                    cells = [f"{name}, {study['data']['rows']:,} rows", arm, len(one["pairs"])]
                    rows.append([*cells, signed(one["mean"]) + exploded, span(one)])
                    fp8 += [(name, arm, one)] if arm.startswith("fp8") else []
            if study.get("mean") is not None:
                cells = [f"{name}, {study['data']['rows']:,} rows", "loka (against bf16_mods)"]
                rows.append([*cells, len(study["pairs"]), signed(study["mean"]), span(study)])
        lines += [*table(["case", "arm", "seeds", "mean", "95 % interval"], rows), ""]
        lines += [*_losses(fp8), ""]
        if (speed := data.get("throughput")) is not None:
            lines += [
                f"Throughput: a training step of the original is {speed['slowdown']:.2f}x slower "
                f"with TorchAO's conversion (the paper: {data['paper']['slowdown']:.2f}x).",
                "",
            ]
    return lines


def _losses(fp8: Sequence[tuple[str, str, dict[str, Any]]]) -> list[str]:
    """Where uniform FP8 is worse beyond the noise, and how much the runs could have hidden."""
    worse = [
        f"{arm} ({name})"
        for name, arm, one in fp8
        if one["without_figure"] or (one["ci95"] and one["ci95"][0] > 0)
    ]
    if worse:
        return [f"Worse than the original beyond the noise between seeds: {', '.join(worse)}."]
    hidden = [one["ci95"][1] for *_, one in fp8 if one["ci95"]]
    if not hidden:
        return []
    return [
        "No run of uniform FP8 here is worse than the original beyond the noise between seeds. "
        f"That noise is large: losses of {min(hidden):.2f} to {max(hidden):.2f} % would not have "
        "been told from it. What the paper shows at production scale is not shown at this one, "
        "but with counts of heavier tails it is: *Where uniform FP8 begins to lose*."
    ]


def uniform_tail() -> list[str]:
    """Where uniform FP8 begins to lose: a case per tail."""
    data = read("uniform_tail.json")
    if data is None:
        return []
    rows, first = [], next(iter(data["studies"].values()))
    for one in data["studies"].values():
        against = {"fp8": one["against_original"]["fp8"], "mods": one["modelling"], "loka": one}
        cells = []
        for pairing in against.values():
            expected = pairing["expected"]
            cells.append(f"{signed(expected['mean'])} ({span(expected)})")
        kernels = one["first_linear"].values()
        rows.append(
            [f"{one['tail']:g}", f"{one['spread_octaves']:.1f}", *cells, ", ".join(kernels)]
        )
    others = data["spread_octaves_of"].items()
    beside = f" ({'; '.join(f'{name} has {octaves:.1f}' for name, octaves in others)})"
    beside = beside if others else ""
    header = ["tail", "octaves", "uniform FP8", "BF16 Mods", "loka (against BF16 Mods)"]
    return [
        "## Where uniform FP8 begins to lose",
        "",
        f"`benchmarks/paper/uniform_tail.py`; {where(data['env'])}. Wukong tiny on "
        f"{first['data']['rows']:,} rows of the synthetic stream (SYNTHETIC), "
        f"{len(first['pairs'])} seeds; its first linear reads 160 raw counts. *tail*: the spread",
        "of their logarithms, of the same clicks; *octaves*: how far the largest count of a batch",
        f"lies above that of its median row{beside}. E4m3 holds 17.8 octaves under one scale, 14.8",
        "of them in full precision. Expected loss in percent against the original in bf16, 95 %",
        "intervals; positive is worse; FP8 is emulated.",
        "",
        *table([*header, "loka's kernels there (fwd, dgrad, wgrad)"], rows),
        "",
        *shown("uniform_tail", "Loss of uniform FP8 and of loka, by the tail of the counts"),
        "",
    ]
