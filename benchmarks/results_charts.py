"""The charts of docs/results.md, drawn from the result files: file name -> SVG text."""

from __future__ import annotations

from typing import Any

from bars import bars
from results_page import read

#: Folder of the charts, beside the page.
FOLDER = "charts"
_FUSED = {
    "bf16, Mods": "bf16_mods_us",
    "fused": "fused_us",
    "fused, e4m3 out": "fused_fp8_out_us",
    "fused, dynamic": "fused_dynamic_us",
    "fused, train": "fused_train_us",
}


def charts() -> dict[str, str]:
    return {**figure_13(), **figure_4(), **uniform_tail()}


def figure_13() -> dict[str, str]:
    """Latency of the chain against compiled bf16 Linear(bias) + LayerNorm + SiLU, by M."""
    data = read("fused_forward_h200.json")
    if data is None:
        return {}
    found = {}
    for m in dict.fromkeys(r["M"] for r in data["rows"]):
        mine = [r for r in data["rows"] if r["M"] == m]
        base = [r["bf16_layernorm_silu_us"] for r in mine]
        series = {
            name: [r[key] / b if r.get(key) else None for r, b in zip(mine, base, strict=True)]
            for name, key in _FUSED.items()
        }
        found[f"figure_13_m{m}.svg"] = bars(
            f"Linear + norm + activation, M = {m}, {data['env']['device']}",
            "time over bf16 LayerNorm + SiLU",
            [f"{r['K']} x {r['N']}" for r in mine],
            series,
            line=1.0,
        )
    return found


def figure_4() -> dict[str, str]:
    """TFLOP/s of the forward GEMM by library, alone and with quantise and layout."""
    data = read("gemm_h200.json")
    if data is None:
        return {}
    rows = [r for r in data["rows"] if r["direction"] == "fwd" and r.get("available")]
    shapes = sorted({(r["M"], r["K"], r["N"]) for r in rows}, key=lambda s: (s[0] * s[1] * s[2], s))
    high = [r for r in rows if r["recipe"] == "high_precision"]
    fp8 = [r for r in rows if r["recipe"] != "high_precision"]
    libraries = sorted({r["library"] for r in fp8})
    found = {}
    for name, key, what in (
        ("compute", "gemm_us", "GEMM alone"),
        ("end_to_end", "total_us", "with quantise and layout"),
    ):
        series = {"bf16": _best(high, shapes, key)}
        for library in libraries:
            mine = [r for r in fp8 if r["library"] == library]
            series[f"{library}, best recipe"] = _best(mine, shapes, key)
        found[f"figure_4_{name}.svg"] = bars(
            f"Forward GEMMs of recommenders, {what}, {data['env']['device']}",
            "TFLOP/s",
            [f"{m},{k},{n}" for m, k, n in shapes],
            series,
        )
    return found


def uniform_tail() -> dict[str, str]:
    """Expected loss by tail; a gain, which lies within the noise, is drawn as none."""
    data = read("uniform_tail.json")
    if data is None:
        return {}
    studies = data["studies"].values()
    arms = {
        "uniform FP8, against bf16": [s["against_original"]["fp8"] for s in studies],
        "loka, against bf16 with Mods": list(studies),
    }
    series = {
        name: [max(one["expected"]["mean"], 0.0) for one in found] for name, found in arms.items()
    }
    title = "The same clicks through counts of heavier tails, Wukong tiny, SYNTHETIC"
    groups = [f"{s['spread_octaves']:.0f} octaves" for s in studies]
    return {"uniform_tail.svg": bars(title, "expected loss, % worse", groups, series)}


def _best(rows: list[dict[str, Any]], shapes: list[tuple[int, ...]], key: str) -> list[Any]:
    times: dict[tuple[int, ...], list[float]] = {}
    for r in rows:
        if r.get(key):
            times.setdefault((r["M"], r["K"], r["N"]), []).append(r[key])
    return [
        2 * m * k * n / min(times[m, k, n]) * 1e-6 if (m, k, n) in times else None
        for m, k, n in shapes
    ]


def shown(prefix: str, caption: str) -> list[str]:
    """Markdown that shows the charts whose names begin so."""
    names = [name for name in charts() if name.startswith(prefix)]
    return [f"![{caption}]({FOLDER}/{name})" for name in names]
