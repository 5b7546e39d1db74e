"""Sections of docs/results.md about kernels and whole steps on a GPU."""

from __future__ import annotations

from typing import Any

from results_charts import shown
from results_page import read
from results_page import table
from results_page import where


def whole_steps() -> list[str]:
    data = read("dispatch_h200.json")
    if data is None:
        return []
    lines = [
        "## Whole steps of Wukong's dense part",
        "",
        f"`benchmarks/bench_dispatch.py`; {where(data['env'])}. Milliseconds: forward and backward",
        "to parameters and input, no optimizer, no embedding tables; bf16 parameters. *chain*: a",
        "plan fixed by hand, our fused chain in every MLP layer. *dispatch*: 8 probed steps, then",
        "the plan that Dispatch makes from measured costs, with the libraries named. *x Mods* and",
        "*x original* compare with BF16 in the same mode.",
        "",
    ]
    by_setting: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in data["rows"]:
        if row.get("ms") is None:
            continue
        key = (row["scale"], row["batch"], row["mode"], row["cuda_graphs"], row["params"])
        by_setting.setdefault(key, {})[row["arm"]] = row["ms"]
    rows = []
    for (scale, batch, mode, graphs, params), arms in by_setting.items():
        for arm, ms in arms.items():
            ratios = [
                f"{arms[base] / ms:.2f}x" if base in arms and base != arm else ""
                for base in ("bf16_mods", "bf16_original")
            ]
            setting = f"{scale}, {batch}, {params}"
            rows.append([setting, mode, "yes" if graphs else "no", arm, f"{ms:.2f}", *ratios])
    header = ["scale, batch, parameters", "mode", "CUDA graphs", "arm", "ms"]
    return [*lines, *table([*header, "x Mods", "x original"], rows), ""]


def slow_copy(data: dict[str, Any]) -> list[str]:
    """What to say of a floor by a copy that was slower than another file's."""
    other = read("interaction_h200.json")
    best = 0.0 if other is None else other["env"]["copy_bytes_per_us"] * 1e-3
    if best <= 1.2 * data["copy_gb_s"]:
        return []
    return [
        f"That copy was a slow one: another of 256 MiB reached {best:.0f} GB/s in a run of its own",
        "(`interaction_h200.json`): by that the floors are "
        f"{best / data['copy_gb_s']:.2f} times too high.",
    ]


def fused_backward() -> list[str]:
    data = read("backward_h200.json")
    if data is None:
        return []
    lines = [
        "## Backward of a fused chain",
        "",
        f"`benchmarks/bench_fused_backward.py`; {where(data['env'])}. Microseconds, medians under",
        "CUDA-graph replay: activation and BlockNorm gradient, written as FP8 row-major and",
        "transposed. *steps*: the same formula and casts compiled by Inductor. *floor*: the bytes,",
        f"each moved once, over the copy bandwidth of the same run ({data['copy_gb_s']:.0f} GB/s);",
        "dynamic scales need a second look at the input (*two reads*), which L2 answers in part.",
        "*1x128*: a scale per 128 values, which one kernel finds on its way: one read.",
        "*stream*: a kernel that moves these bytes and computes nothing.",
        *slow_copy(data),
        "",
    ]
    columns = {
        "tensorwise": "fused_us",
        "rowwise": "fused_rows_us",
        "1x128": "fused_blocks_us",
        "steps": "steps_us",
        "floor": "floor_us",
        "two reads": "two_reads_us",
        "stream": "stream_us",
    }
    rows = [
        [
            f"{r['M']},{r['N']}",
            # Older files lack the last forms' columns.
            *(f"{r[key]:.1f}" if key in r else "" for key in columns.values()),
        ]
        for r in data["rows"]
    ]
    return [*lines, *table(["M,N", *columns], rows), "", *issued()]


def issued() -> list[str]:
    """What bounds the backward besides memory."""
    data = read("issued_sm90.json")
    if data is None:
        return []
    lines = [
        "Instructions of these kernels a value (`benchmarks/count_issued.py`, Triton "
        f"{data['env']['triton']}), and the time for",
        "4096 x 4096 values if a scheduler issued one each cycle, of the ALU every other cycle:",
        "",
    ]
    header = ["kernel", "issued", "of the ALU", "us at least"]
    rows = [
        [
            {"blocks": "1x128", "amax": "tensorwise, amax", "quantize": "tensorwise, write"}[
                r["kernel"]
            ],
            *(f"{r[key]:.1f}" for key in ("issued", "alu", "us_4096x4096")),
        ]
        for r in data["rows"]
    ]
    return [*lines, *table(header, rows), ""]


def launches() -> list[str]:
    data = read("launch_h200.json")
    if data is None:
        return []
    lines = [
        "## Host time of a call",
        "",
        f"`benchmarks/bench_launch.py`; {where(data['env'])}. Microseconds until Python goes",
        "on, of our ops in a step that is settled, and of what torch takes for the like.",
        "*by Triton*: the same with Triton's own launcher under it.",
        "",
    ]
    rows = [
        [
            f"`{r['op']}`",
            f"{r['us']:.1f}",
            f"{r['by_triton_us']:.1f}" if "by_triton_us" in r else "",
        ]
        for r in data["rows"]
    ]
    return [*lines, *table(["call", "us", "by Triton"], rows), ""]


def quantisers() -> list[str]:
    data = read("quantize_h200.json")
    if data is None:
        return []
    lines = [
        "## FP8 in both orientations",
        "",
        f"`benchmarks/bench_quantize.py`; {where(data['env'])}. Microseconds, medians under",
        "CUDA-graph replay, of a bf16 matrix. *scales*: as it lies, of the transpose. *steps*: the",
        "same formulas compiled by Inductor. *floor*: one read and two FP8 writes at the copy",
        f"bandwidth of the same run ({data['copy_gb_s']:.0f} GB/s); tensor and row scales need a",
        "second look at the input, which L2 answers in part.",
        "",
    ]
    rows = [
        [
            f"{r['R']},{r['C']}",
            r["scales"],
            *(f"{r[key]:.1f}" for key in ("kernel_us", "steps_us", "floor_us")),
            f"{r['steps_us'] / r['kernel_us']:.2f}x",
            "yes" if r["equal"] else "NO",
        ]
        for r in data["rows"]
    ]
    header = ["R,C", "scales", "one kernel", "steps", "floor", "speedup", "same bytes"]
    return [*lines, *table(header, rows), ""]


def grouped_weights() -> list[str]:
    data = read("weights_h200.json")
    if data is None:
        return []
    lines = [
        "## All weights of a step",
        "",
        f"`benchmarks/bench_weights.py`; {where(data['env'])}. Microseconds, medians, for the",
        f"{len(data['shapes'])} weights of Wukong `base` in both orientations, taken in bf16.",
        "*device*: under CUDA-graph replay; *host*: to start it all. *floor*: a read for the",
        "maxima, where there are any, another for the values and two FP8 writes at the copy",
        f"bandwidth of the same run ({data['copy_gb_s']:.0f} GB/s).",
        *slow_copy(data),
        "",
    ]
    keys = ("together_device_us", "each_device_us", "floor_us", "together_host_us", "each_host_us")
    rows = [
        [
            r["dtype"],
            r["scales"],
            *(f"{r[key]:.1f}" for key in keys),
            "yes" if r["equal"] else "NO",
        ]
        for r in data["rows"]
    ]
    header = [
        "weights", "scales", "device, together", "one by one", "floor", "host, together",
        "one by one", "same bytes",
    ]  # fmt: skip
    return [*lines, *table(header, rows), ""]


def gemms() -> list[str]:
    data = read("gemm_h200.json")
    if data is None:
        return []
    lines = [
        "## Bare GEMMs: every library, recipe and direction",
        "",
        f"`benchmarks/bench_gemm.py`; {where(data['env'])}. Microseconds, medians under CUDA-graph",
        "replay, of bf16 operands: *bf16*; the fastest FP8 kernel *alone*, and the fastest *with",
        "quantise and layout*. M, K, N are the linear's; the file has every row.",
        "",
    ]
    by_cell: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in data["rows"]:
        by_cell.setdefault((r["M"], r["K"], r["N"], r["direction"]), []).append(r)
    rows = []
    for (m, k, n, direction), cell in by_cell.items():
        ran = [r for r in cell if r["available"]]
        high = [r["total_us"] for r in ran if r["recipe"] == "high_precision" and r["total_us"]]
        fp8 = [r for r in ran if r["recipe"] != "high_precision"]
        shown_cells = []
        for key in ("gemm_us", "total_us"):
            timed = [r for r in fp8 if r.get(key)]
            best = min(timed, key=lambda r: r[key], default=None)
            shown_cells += (
                [f"{best[key]:.1f}", f"{best['library']}:{best['recipe']}"] if best else ["-", "-"]
            )
        bf16 = f"{high[0]:.1f}" if high else "-"
        rows.append([f"{m},{k},{n}", direction, bf16, *shown_cells])
    header = ["M,K,N", "direction", "bf16", "alone", "by", "with quantise and layout", "by"]
    drawn = shown("figure_4", "TFLOP/s of forward GEMMs by library")
    return [*lines, *table(header, rows), "", *drawn, ""]


def sanitizer() -> list[str]:
    data = read("sanitizer_h200.json")
    if data is None:
        return []
    tools = list(dict.fromkeys(r["tool"] for r in data["rows"]))
    found: dict[str, dict[str, str]] = {}
    for r in data["rows"]:
        said = "clean" if r["clean"] else r["summary"] or f"exit code {r['exit_code']}"
        found.setdefault(r["kernel"], {})[r["tool"]] = said
    return [
        "## Kernels under compute-sanitizer",
        "",
        f"`benchmarks/sanitize.py`; {where(data['env'])}.",
        "",
        *table(
            ["kernel", *tools], [[k, *(v.get(t, "-") for t in tools)] for k, v in found.items()]
        ),
        "",
    ]


def pointwise() -> list[str]:
    data = read("pointwise_h200.json")
    if data is None:
        return []
    lines = [
        "## Exact epilogues in one kernel",
        "",
        f"`benchmarks/bench_pointwise.py`; {where(data['env'])}. Microseconds, medians under",
        "CUDA-graph replay, FP8 operands ready. *bf16*: linear and epilogue compiled; *steps*:",
        "`torch._scaled_mm` and the epilogue compiled; *fused*: one kernel, with the tile that the",
        "package picks, and with the best of all tiles (*tuned*).",
        "",
    ]
    columns = {"bf16": "bf16_us", "steps": "steps_us", "fused": "fused_us", "tuned": "tuned_us"}
    rows = [
        [
            r["form"],
            f"{r['M']},{r['K']},{r['N']}",
            *(f"{r[key]:.1f}" for key in columns.values()),
            f"{r['bf16_us'] / r['fused_us']:.2f}x",
            f"{r['steps_us'] / r['fused_us']:.2f}x",
        ]
        for r in data["rows"]
    ]
    return [*lines, *table(["epilogue", "M,K,N", *columns, "over bf16", "over steps"], rows), ""]
