"""Benchmarks that run anywhere, on made-up measurements and on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
ENV = {"torch": "2.11.0", "device": "NVIDIA H200 sm90", "date": "2026-11-30"}


def script(name: str):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def gemm_file(path: Path, times: dict[tuple[str, str], float], m: int = 1024) -> Path:
    rows = [
        {"library": "torch", "recipe": recipe, "direction": direction, "M": m, "K": 256, "N": 512,
         "total_us": us, "gemm_us": us, "available": True}
        for (direction, recipe), us in times.items()
    ]  # fmt: skip
    path.write_text(json.dumps({"env": ENV, "rows": rows}))
    return path


def test_regret_is_what_the_oracle_says_of_the_choice(tmp_path, monkeypatch):
    table = {("fwd", "high_precision"): 10.0, ("fwd", "tensorwise"): 5.0, ("fwd", "rowwise"): 5.1,
             ("dgrad", "high_precision"): 10.0, ("dgrad", "tensorwise"): 9.8}  # fmt: skip
    oracle = {**table, ("fwd", "tensorwise"): 5.5, ("fwd", "rowwise"): 5.0}
    paths = [gemm_file(tmp_path / f"{n}.json", t) for n, t in (("a", table), ("b", oracle))]
    out = tmp_path / "regret.json"
    bench = script("bench_regret")
    arguments = ["--table", str(paths[0]), "--oracle", str(paths[1]), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench_regret.py", *arguments])
    bench.main()
    found = json.loads(out.read_text())
    by_direction = {c["direction"]: c for c in found["cases"]}
    assert by_direction["fwd"]["chosen"] == "torch:tensorwise"
    assert by_direction["fwd"]["regret_percent"] == pytest.approx(10.0)
    # 2 % is below the bar: high precision stays, which is policy and not a wrong guess.
    assert by_direction["dgrad"]["chosen"] == "high_precision"
    assert by_direction["dgrad"]["regret_percent"] == pytest.approx(100 * (10 / 9.8 - 1))
    assert by_direction["dgrad"]["without_bar_percent"] == pytest.approx(0.0)
    assert found["max_percent"] == pytest.approx(10.0)
    assert found["mean_percent"] == pytest.approx((10 + 100 * (10 / 9.8 - 1)) / 2)
    monkeypatch.setattr(
        sys, "argv", ["bench_regret.py", *arguments[:3], str(paths[0]), *arguments[4:]]
    )
    with pytest.raises(SystemExit):
        bench.main()


def test_startup_counts_our_work_on_a_graph():
    found = script("startup_passes").passes(30, repeats=1)
    # Two of three are fused with their norm, the third with its activation.
    assert found["linears"] == found["fused"] == 30
    assert {"canonicalize", "block_norm", "fuse", "dispatch", "handover"} <= set(found["pass_ms"])
    assert found["seconds"] == pytest.approx(found["capture_s"] + found["rewrite_s"])


def test_sections_say_what_the_files_say(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    sections, bench = script("results_dispatch"), script("bench_startup")
    pairs = [
        tuple(dict.fromkeys(bench.CLOCKS.values(), s) for s in (2.0, loka))
        for loka in (2.2, 2.0, 8.0)
    ]
    arms = {"bf16_original": 15.0, "bf16_mods": 11.0, "torch:rowwise": 12.0, "dispatch": 9.9,
            "chain:rowwise": 9.0}  # fmt: skip
    setting = {"scale": "base", "batch": 64, "params": "bf16", "mode": "train"}
    files = {
        "dispatch_h200.json": {
            "env": ENV,
            "rows": [
                {**setting, "cuda_graphs": True, "arm": arm, "ms": ms} for arm, ms in arms.items()
            ],
        },
        "startup.json": {
            "env": ENV,
            "startup": {"linears": 24, **bench.compared(pairs)},
            "passes": {"linears": 300, "seconds": 0.9},
            "recompiles": {"batch_sizes": 50, "graphs": 1},
        },
        "dispatch_regret.json": {
            "env": ENV, "mean_percent": 1.25, "max_percent": 9.5, "cases_compared": 1,
            "without_bar_mean_percent": 0.5, "min_speedup": 1.05,
            "cases": [{"direction": "fwd", "M": 1, "K": 2, "N": 3, "chosen": "a", "best": "b",
                       "regret_percent": 9.5}],
        },
    }  # fmt: skip
    files["plan_h200.json"] = {
        "env": ENV, "model": "wukong:base", "batch": 64, "dtype": "bfloat16",
        **{when: {"sites": 9, "shapes": 5, "plans": [{"seconds": seconds}]}
           for when, seconds in (("cold", {"plan": 12.5, "timing": 9.04, "choice": 0.01}),
                                 ("warm", {"plan": 3.0, "errors": 2.5}))},
    }  # fmt: skip
    start = script("results_start")
    for module in (sections, start):
        monkeypatch.setattr(module, "read", files.get)
    # A plan fixed by hand is no uniform recipe, and the original is another model.
    assert any(
        "| base, 64, bf16 | train | yes | 9.90 | bf16_mods | 11.00 | -10.0 % |" in line
        for line in sections.against_uniform()
    )
    assert "1.10x" in "\n".join(start.startup())
    made = "| wukong:base, 64, bfloat16 | 9 | 5 | empty | 12.5 s | timing 9.0 |"
    assert made in start.plans()
    assert "1.25 % on average" in "\n".join(sections.regret())
    assert sections.pricing() == sections.estimator() == []


@pytest.mark.skipif("LOKA_DATA" not in os.environ, reason="LOKA_DATA names no click logs")
def test_recording_sees_every_site_but_the_head():
    """What the tables of the Probe stand on; also past the steps after which a plan is made."""
    rank = script("bench_budget_rank")
    one = rank.tr.train("dcn_v2", "log", "tiny", os.environ["LOKA_DATA"], 1, 10, batch=64)
    sites = rank.tr.record(one, one.later)
    assert len(sites) == 6
    assert all(len(s.x) == len(s.gy) == 10 for s in sites)
    assert all(s.x[0].shape[1] == s.w.shape[1] and s.gy[0].shape[1] == s.w.shape[0] for s in sites)


CHILD = """
import sys, time
sys.path.insert(0, {folder!r})
from turns import say, settings, wait_for_turn
kind = settings()["kind"]
if kind == "maker":
    say(planned_s=0.0)
if kind == "fails":
    raise ValueError("no such kernel")
if kind == "hangs":
    time.sleep(600)
say(ready_s=1.0)
for turn in range(2):
    wait_for_turn()
    if kind == "stops" and turn:
        sys.exit(3)
    say(ms=turn, begun=time.monotonic())
"""


def test_processes_measure_in_turn_and_one_that_fails_costs_the_others_nothing(tmp_path) -> None:
    turns = script("turns")
    child = tmp_path / "child.py"
    child.write_text(CHILD.format(folder=str(FOLDER)))
    kinds = ["plain", "fails", "hangs", "stops", "maker"]
    workers = [turns.Worker(child, {"kind": k}, 2, makes_plan=k == "maker") for k in kinds]
    begun = time.monotonic()
    rows = [
        (worker.settings["kind"], turn, row)
        for worker, turn, row in turns.in_turn(workers, begun + 60, 5, ready_seconds=5.0)
    ]
    assert time.monotonic() - begun < 30
    errors = {(kind, turn): row["error"] for kind, turn, row in rows if "error" in row}
    assert errors.keys() == {("fails", 0), ("hangs", 0), ("stops", 1)}
    assert errors["hangs", 0] == "out of time" and "no such kernel" in errors["fails", 0]
    measured = [(kind, turn, row["ms"]) for kind, turn, row in rows if "error" not in row]
    # Those that make a plan are first.
    assert measured == [
        ("maker", 0, 0), ("maker", 1, 1), ("plain", 0, 0), ("plain", 1, 1), ("stops", 0, 0)
    ]  # fmt: skip
    times = [row["begun"] for _, _, row in rows if "begun" in row]
    assert times == sorted(times)
    assert not any(worker.runs for worker in workers)
    assert list(turns.in_turn(workers, time.monotonic() - 1, 5)) == []


def test_what_deep_gemm_compiles_is_every_shape_of_the_model_once(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    bench = script("compile_deep_gemm")
    device = bench.torch.device("cuda" if bench.torch.cuda.is_available() else "cpu")
    found = bench.cells("wukong:tiny", [64, 256], device)
    assert len(set(found)) == len(found)
    assert {m for m, k, n, _ in found if (k, n) == (256, 256)} == {64, 256}
    for direction in ("fwd", "dgrad", "wgrad"):
        assert (64, 256, 256, direction) in found
    # Each is called with operands whose rows are what that direction multiplies.
    library, seen = bench.LIBRARIES["deep_gemm"], []
    monkeypatch.setattr(library, "call", lambda a, sa, b, sb, rule, out: seen.append((a, b)))
    monkeypatch.setattr(bench.torch.cuda, "synchronize", lambda *a: None)
    for direction in ("fwd", "dgrad", "wgrad"):
        bench.compile_one((64, 384, 128, direction), device)
    shapes = [(tuple(a.shape), tuple(b.shape)) for a, b in seen]
    assert shapes == [((64, 384), (128, 384)), ((64, 128), (384, 128)), ((128, 64), (384, 64))]


def test_a_row_is_the_median_of_its_processes(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    bench = script("bench_dispatch")
    where = dict.fromkeys(bench.KEY, "x")
    rows = []
    bench.merged(rows, {**where, "ms": None, "error": "failed"})
    assert [r["ms"] for r in rows] == [None]
    bench.merged(rows, {**where, "ms": 3.0})
    # What failed before is no measurement.
    assert [r["ms"] for r in rows] == [3.0] and "each_ms" not in rows[0]
    for ms in (1.0, 2.5):
        bench.merged(rows, {**where, "ms": ms})
    bench.merged(rows, {**where, "ms": None, "error": "failed"})
    assert [(r["ms"], r["each_ms"]) for r in rows] == [(2.5, [3.0, 1.0, 2.5])]
    bench.merged(rows, {**where, "arm": "other", "ms": 7.0})
    assert {r["arm"]: r["ms"] for r in rows} == {"x": 2.5, "other": 7.0}
