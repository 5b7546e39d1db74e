"""Sections of docs/results.md about the paper's figures; each is empty without its file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from results_page import RESULTS
from results_page import read
from results_page import table
from results_page import where


def signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.4f}"


def span(one: dict[str, Any]) -> str:
    return "-" if one["ci95"] is None else " .. ".join(map(signed, one["ci95"]))


def worst(one: dict[str, Any]) -> str:
    return signed(max((w for w in one["window_upper95"] if w is not None), default=None))


def quality() -> list[str]:
    found = [read(path.name) for path in sorted(RESULTS.glob("quality_*.json"))]
    rows, control, modelling = [], [], []
    for data in filter(None, found):
        made = " (SYNTHETIC)" if data["data"]["synthetic"] else ""
        config = data["config"]
        name = f"{data['data']['source']}{made}, {config['model']} {config['scale']}"
        name += " (emulated)" if data["env"]["emulated"] else ""
        for label, one in (("", data), (", expected loss", data.get("expected"))):
            if one and one.get("ci95"):
                share = data["fp8_share"].get("loka", data["fp8_share"])
                lost = len(data.get("given_up", {}).get("loka", ()))
                gave_up = f"; {lost} directions gave FP8 up" if lost else ""
                rows.append(
                    [
                        name + label,
                        len(data["pairs"]),
                        signed(one["mean"]),
                        span(one),
                        worst(one),
                        f"{100 * share['steps']:.0f} % / {100 * share['flops']:.0f} %{gave_up}",
                        f"{data['arms']['bf16_mods']['ne']:.4f}",
                        "yes" if one["verdict"]["passes"] else "no",
                    ]
                )
        for kind, into in (("aa_control", control), ("modelling", modelling)):
            if data.get(kind):
                one = data[kind]
                into.append([name, len(one["pairs"]), signed(one["mean"]), span(one), worst(one)])
    if not rows:
        return []
    asked = "Modelling question, BF16 and Mods against the original:"
    header = ["data, model", "seeds", "mean", "95 % interval", "worst window's bound"]
    where_ = {where(d["env"]) for d in found if d}
    return [
        "## Does FP8 train losslessly",
        "",
        f"`loka compare`; {'; '.join(sorted(where_))}. RLL in percent, paired by seed (same",
        "initial weights, same rows in the same order), progressive validation; positive is worse.",
        "Target: upper bound at most +0.02 overall and +0.03 in each window under the plan.",
        "",
        "Precision question, FP8 and Mods against BF16 and Mods:",
        "",
        *table(
            [*header, "FP8 share of steps / linear FLOPs", "NE of BF16+Mods", "target met"], rows
        ),
        "",
        *(["A/A control, the noise floor:", "", *table(header, control), ""] if control else []),
        *([asked, "", *table(header, modelling), ""] if modelling else []),
    ]


def block_sizes() -> list[str]:
    data = read("figure_8.json")
    if data is None:
        return []
    rows = []
    for name, study in data["studies"].items():
        one = study.get("against_whole_row")
        arm = study["arms"]["bf16_mods"]
        if one:
            rows.append([name, f"{arm['ne']:.5f}", signed(one["mean"]), span(one)])
        else:
            rows.append([name, f"{arm['ne']:.5f}", "-", "-"])
    return [
        "## Figure 8: block sizes",
        "",
        f"`benchmarks/paper/figure_8.py`; {where(data['env'])}. BF16 with all Mods. The paper: "
        f"{data['paper']['note']}. A block that is asked for holds in every norm, also in those "
        "that no linear feeds, which the default leaves whole; at `tiny` these are the only ones "
        "wider than 256, so that what a block of 256 costs there is what it costs to cut them.",
        "",
        *table(["block", "NE", "RLL % against the whole row", "95 % interval"], rows),
        "",
    ]


def _pairings(data: dict[str, Any], kinds: Sequence[str]) -> list[str]:
    rows = []
    for name, study in data["studies"].items():
        for kind in kinds:
            for arm, one in study[kind].items():
                if one:
                    cells = [name, arm, one["base"], len(one["pairs"])]
                    rows.append([*cells, signed(one["mean"]), span(one)])
    return table(["data, model", "arm", "against", "seeds", "mean", "95 % interval"], rows)


def norm_blocks() -> list[str]:
    data = read("norm_blocks.json")
    if data is None:
        return []
    return [
        "## Blocks of a norm that no linear feeds",
        "",
        f"`benchmarks/paper/norm_blocks.py`; {where(data['env'])}. BF16 with all Mods; the arms",
        "differ in the norms that no linear feeds: default blocks, equal blocks, the whole row.",
        "RLL in percent, paired by seed.",
        "",
        *_pairings(data, ("against_original", "against_blocks")),
        "",
    ]


def each_mod_table() -> list[str]:
    """What `docs/mods.md` has of it."""
    data = read("each_mod.json")
    return [] if data is None else [*_pairings(data, ("against_original",)), *_old_biases(data)]


def _old_biases(data: dict[str, Any]) -> list[str]:
    old = [name for name, study in data["studies"].items() if "biases_of_norms" not in study]
    note = "*no_bias* is the biases of linears alone; those of norms went with *block_norm*."
    return ["", f"In {', '.join(old)} {note}"] if old else []


def each_mod() -> list[str]:
    data = read("each_mod.json")
    if data is None:
        return []
    return [
        "## Each Mod by itself",
        "",
        f"`benchmarks/paper/each_mod.py`; {where(data['env'])}. BF16 with one Mod alone, and with",
        "all of them, against the model as written. RLL in percent, paired by seed; positive is",
        "worse.",
        "",
        *each_mod_table(),
        "",
    ]


def bias_norms() -> list[str]:
    data = read("figure_6.json")
    if data is None:
        return []
    counts = ", ".join(f"{n} {kind}" for kind, n in sorted(data["counts"].items()))
    return [
        "## Figure 6: norms of biases over training",
        "",
        f"`benchmarks/paper/figure_6.py`; {where(data['env'])}. The paper: "
        f"{data['paper']['note']}.",
        f"Here (Wukong {data['config']['scale']}, {data['config']['dense']} counts, "
        f"{data['data']['rows']:,} rows of {data['data']['source']}), of {len(data['biases'])} "
        f"biases: {counts}; {data['moved_by_half']} moved by more than half of what they began",
        f"with; {data['at_least_0.1']} end at 0.1 and more, where torch's initialisation puts "
        "most of them.",
        "",
    ]


def speed() -> list[str]:
    data = read("figure_10_h200.json")
    if data is None:
        return []
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in data["rows"]:
        case = dict(row["case"])
        arm = case.pop("arm")
        found.setdefault(tuple(case.values()), {})[arm] = row
    rows = []
    for (model, scale, batch, mode, dtype, train), arms in found.items():
        ms = {arm: row.get("ms") for arm, row in arms.items()}

        def against(base: str, ms: dict[str, Any] = ms) -> str:
            both = ms.get(base) and ms.get("loka")
            return f"{ms[base] / ms['loka']:.2f}x" if both else "-"

        shown = [f"{ms[a]:.2f}" if ms.get(a) else "-" for a in _SPEED_ARMS]
        # CUDA graphs keep what they need in pools of their own.
        kind = "peak_gib" if mode == "default" else "reserved_gib"
        peaks = [arms.get(arm, {}).get(kind) for arm in ("original", "bf16_mods", "loka")]
        rows.append(
            [
                f"{model} {scale}",
                batch,
                mode,
                dtype,
                "train" if train else "inference",
                *shown,
                against("bf16_mods"),
                against("original"),
                " / ".join(f"{p:.1f}" if p else "-" for p in peaks),
            ]
        )
    header = ["model", "batch", "mode", "parameters", "step", *_SPEED_ARMS]
    header += ["over BF16+Mods", "over original", "peak GiB (original / Mods / loka)"]
    return [
        "## Figure 10: speed",
        "",
        f"`benchmarks/paper/figure_10.py`; {where(data['env'])}. Milliseconds per step of the",
        f"dense part, compute only. The paper: {data['paper']['note']}.",
        "",
        *table(header, rows),
        "",
    ]


_SPEED_ARMS = ("original", "torchao_tensorwise", "bf16_mods", "loka")


def latency() -> list[str]:
    data = read("figure_11_h200.json")
    if data is None:
        return []
    good = [row for row in data["rows"] if "ms_by_kind" in row]
    kinds = list(dict.fromkeys(kind for row in good for kind in row["ms_by_kind"]))
    rows = [
        [
            row["arm"],
            *(f"{row['ms_by_kind'].get(k, 0.0):.2f}" for k in kinds),
            f"{row['ms']:.2f}",
            f"{row['peak_gib']:.1f}" if row.get("peak_gib") else "-",
        ]
        for row in good
    ]
    return [
        "## Figure 11: where a step's time goes",
        "",
        f"`benchmarks/paper/figure_11.py`; {where(data['env'])}. Device milliseconds per training",
        f"step by kind of kernel. The paper: {data['paper']['note']}.",
        "",
        *table(["arm", *kinds, "all", "peak GiB"], rows),
        "",
    ]
