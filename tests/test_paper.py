"""The scripts of the paper's figures, on a few rows, and the sections of the page they feed."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    not (ROOT / "benchmarks" / "paper").exists(), reason="no benchmarks beside the tests"
)
DATA = "synthetic:rows=1024,fields=5,dense=3"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("benchmarks", "benchmarks/paper"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    compile_ = torch.compile

    def quick(module: Any, backend: str = "inductor", options: Any = None, **how: Any) -> Any:
        if backend == "inductor":
            return module
        return compile_(
            module, backend=backend, options=options and {**options, "inner": "eager"}, **how
        )

    monkeypatch.setattr(torch, "compile", quick)


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> Any:
    module = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    module.main()
    return module


def section(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str) -> str:
    page = importlib.import_module("results_page")
    paper = importlib.import_module("results_paper")
    for module in (page, paper):
        monkeypatch.setattr(module, "RESULTS", folder)
    maker = paper if hasattr(paper, name) else importlib.import_module("results_uniform")
    return "\n".join(getattr(maker, name)())


def test_uniform_fp8_and_its_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = importlib.import_module("figure_9")
    monkeypatch.setattr(module, "ARMS", ("original", "fp8", "fp8_all_mods", "bf16_mods"))
    out = tmp_path / "figure_9.json"
    common = ["--data", DATA, "--device", "cpu", "--batch", "64", "--seeds", "2"]
    where = ["--out", str(out), "--work", str(tmp_path / "w")]
    run(monkeypatch, "figure_9", *common, *where, "--cases", "norms")
    result = json.loads(out.read_text())
    study = result["studies"]["stress, raw counts"]
    ours = result["measured"]["stress, raw counts"]
    assert set(ours) == {"fp8", "fp8_all_mods", "bf16_mods"}
    assert ours["fp8"]["rll_percent"] == study["against_original"]["fp8"]["mean"]
    assert ours["fp8"]["worst_window_mean"] is not None
    assert out.with_suffix(".svg").read_text().count("fp8_all_mods") > 0
    assert study["faults"] == study["missing"] == []
    assert set(study["against_original"]) == {"fp8", "fp8_all_mods"}
    # FP8 on the wide linears only: a part of the FLOPs. What is forced runs so from the first step.
    share = study["fp8_share"]["fp8"]
    assert 0.1 < share["flops"] < share["steps"] <= 1.0
    text = section(monkeypatch, tmp_path, "stress")
    assert re.search(r"\| stress, raw counts, [\d,]+ rows \| fp8 \|", text) and "H100" in text


def test_tails_beyond_what_one_scale_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = importlib.import_module("uniform_tail")
    # The same shape with fewer tables.
    monkeypatch.setattr(module, "DATA", "synthetic:fields=3,dense=160,tail={:g},rows={}")
    out = tmp_path / "uniform_tail.json"
    common = ["--rows", "1000", "--batch", "64", "--seeds", "2", "--device", "cpu"]
    where = ["--work", str(tmp_path / "w"), "--out", str(out)]
    run(monkeypatch, "uniform_tail", *common, *where, "--tails", "1", "3", "--beside", "synthetic")
    found = json.loads(out.read_text())
    assert list(found["studies"]) == ["tail 1", "tail 3"]
    mild, heavy = found["studies"].values()
    assert mild["spread_octaves"] < 9 < 12 < heavy["spread_octaves"]
    assert 0 < found["spread_octaves_of"]["synthetic"] < 15
    assert mild["fp8_share"]["fp8"]["flops"] > 0.5
    # Clicks and their probabilities do not hang on the tail.
    assert mild["data"] == heavy["data"] and mild["data"]["synthetic"]
    assert set(heavy["first_linear"]) == {"fwd", "dgrad", "wgrad"}
    text = section(monkeypatch, tmp_path, "uniform_tail")
    assert re.search(r"\| 3 \| \d\d\.\d \|", text) and "SYNTHETIC" in text
    assert (
        "expected loss, % worse"
        in importlib.import_module("results_charts").uniform_tail()["uniform_tail.svg"]
    )


def test_where_uniform_fp8_begins_to_lose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = importlib.import_module("figure_3")
    monkeypatch.setattr(module, "ARMS", ("original", "fp8"))
    monkeypatch.setattr(
        module, "CASES", {"a": ("tiny", "standard", 1e-3), "b": ("tiny", "raw", 2e-3)}
    )
    monkeypatch.setattr(module, "has_fp8", lambda device: True)
    monkeypatch.setattr(module, "throughput", lambda *a: {"slowdown": 1.25})
    out = tmp_path / "figure_3.json"
    common = ["--data", DATA, "--device", "cpu", "--batch", "256", "--seeds", "2"]
    where = ["--work", str(tmp_path / "w"), "--out", str(out)]
    run(monkeypatch, "figure_3", *common, *where, "--time-limit", "-1")
    assert not out.exists()  # no time for a single unit, and nothing to show
    run(monkeypatch, "figure_3", *common, *where, "--parts", "quality")
    first = json.loads(out.read_text())
    assert list(first["studies"]) == list(first["measured"]) == ["a", "b"]
    assert "throughput" not in first
    # What was trained stays, and what was measured apart stands beside it.
    run(monkeypatch, "figure_3", *common, *where, "--parts", "throughput")
    second = json.loads(out.read_text())
    assert second["measured"] == first["measured"]
    assert second["throughput"] == {"slowdown": 1.25}
    assert "1.25x slower" in section(monkeypatch, tmp_path, "stress")


def test_block_sizes_and_their_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = importlib.import_module("figure_8")
    monkeypatch.setattr(module, "BLOCKS", (module.WHOLE, 64))
    out = tmp_path / "figure_8.json"
    common = ["--data", DATA, "--device", "cpu", "--batch", "128", "--seeds", "2"]
    more = ["--scale", "tiny", "--work", str(tmp_path / "w"), "--out", str(out)]
    run(monkeypatch, "figure_8", *common, *more)
    studies = json.loads(out.read_text())["studies"]
    pairs = studies["block 64"]["against_whole_row"]["pairs"]
    assert len(pairs) == 2 and all(p["rll_percent"] != 0.0 for p in pairs)
    assert "| block 64 |" in section(monkeypatch, tmp_path, "block_sizes")


def test_norms_that_no_linear_feeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "norm_blocks.json"
    # 36 fields and 4 tokens make the factorisation machine's norm 320 wide, as on KuaiRand.
    data = "synthetic:rows=512,fields=36,dense=3"
    common = ["--data", data, "--device", "cpu", "--batch", "128", "--seeds", "2"]
    more = ["--work", str(tmp_path / "w"), "--out", str(out)]
    run(monkeypatch, "norm_blocks", *common, *more)
    run(monkeypatch, "norm_blocks", *common, *more, "--name", "again")
    studies = json.loads(out.read_text())["studies"]
    first, again = studies["kuairand, wukong tiny"], studies["again, wukong tiny"]
    assert set(first["against_original"]) == {"mods_blocks", "mods_rows", "mods_even"}
    for pair in first["against_blocks"].values():
        assert len(pair["pairs"]) == 2 and all(p["rll_percent"] != 0.0 for p in pair["pairs"])
    assert first["against_blocks"] == again["against_blocks"]
    assert "| again, wukong tiny | mods_rows |" in section(monkeypatch, tmp_path, "norm_blocks")


def test_each_mod_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "each_mod.json"
    common = ["--data", DATA, "--device", "cpu", "--batch", "128", "--seeds", "2"]
    more = ["--work", str(tmp_path / "w"), "--out", str(out), "--keep", "no_bias=*.mlp.0"]
    run(monkeypatch, "each_mod", *common, *more)
    (found,) = json.loads(out.read_text())["studies"].values()
    assert found["missing"] == []
    losses = {a: one["mean"] for a, one in found["against_original"].items()}
    arms = ("bf16_no_bias", "bf16_block_norm", "bf16_hard_swish", "bf16_mods")
    assert set(losses) == {*arms, "bf16_mods, no_bias=*.mlp.0 kept"}
    # Each changes the model, and by something of its own.
    assert len({0.0, *losses.values()}) == 6, losses
    assert "| bf16_hard_swish |" in section(monkeypatch, tmp_path, "each_mod")


def test_bias_norms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "figure_6.json"
    module = run(
        monkeypatch,
        "figure_6",
        "--data",
        DATA,
        "--device",
        "cpu",
        "--scale",
        "tiny",
        "--out",
        str(out),
    )
    result = json.loads(out.read_text())
    assert sum(result["counts"].values()) == len(result["biases"]) > 5
    assert "converges" in section(monkeypatch, tmp_path, "bias_norms")
    t = np.linspace(0, 1, 60)
    assert module.classify(np.full(60, 0.3)) == "converges"
    assert module.classify(1 - np.exp(-20 * t)) == "converges"
    assert module.classify(t) == "grows"
    assert module.classify(1.1 - t) == "shrinks"
    assert module.classify(1 + 0.5 * np.sin(60 * t)) == "wanders"


def test_speed_rows_add_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.import_module("speed"), "FIELDS", 6)
    out = tmp_path / "figure_10_h200.json"
    common = ["--device", "cpu", "--inner", "eager", "--scale", "tiny", "--models", "dlrm"]
    one = ["--batches", "32", "--modes", "default", "--dtypes", "float32", "--out", str(out)]
    run(monkeypatch, "figure_10", *common, *one, "--arms", "bf16_mods", "loka")
    first = json.loads(out.read_text())["rows"]
    assert [r["case"]["train"] for r in first] == [True, True, False, False]
    assert all(r["ms"] > 0 for r in first)
    assert first[1]["directions"] > 0
    run(monkeypatch, "figure_10", *common, *one, "--arms", "bf16_mods", "loka", "original")
    both = json.loads(out.read_text())["rows"]
    assert both[:4] == first and len(both) == 6
    for row, arm in zip(both, ("bf16_mods", "loka"), strict=False):
        assert row["case"]["arm"] == arm and row["peak_gib"] is None  # a CPU's is not counted
        row |= {"peak_gib": 2.25, "reserved_gib": 3.5}
    out.write_text(json.dumps({**json.loads(out.read_text()), "rows": both}))
    text = section(monkeypatch, tmp_path, "speed")
    assert "- / 2.2 / 2.2 |" in text
    assert "| dlrm tiny | 32 | default | float32 | train |" in text


def test_a_studys_result_makes_the_quality_tables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pairing = {
        "pairs": [{"seed": 0}, {"seed": 1}],
        "mean": 0.004,
        "ci95": [-0.003, 0.0112],
        "window_upper95": [None, 0.021],
    }
    result = {
        **pairing,
        "modelling": {**pairing, "mean": 0.19},
        "aa_control": {**pairing, "mean": 0.0001},
        "verdict": {"passes": True},
        "fp8_share": {"steps": 0.98, "flops": 0.61},
        "arms": {"bf16_mods": {"ne": 0.8712}},
        "env": {"torch": "2.11.0", "device": "NVIDIA H200", "date": "d", "emulated": False},
        "config": {"model": "dhen", "scale": "tiny"},
        "data": {"source": "synthetic", "synthetic": True},
    }
    (tmp_path / "quality_x.json").write_text(json.dumps(result))
    text = section(monkeypatch, tmp_path, "quality")
    row = "| synthetic (SYNTHETIC), dhen tiny | 2 | +0.0040 | -0.0030 .. +0.0112 | +0.0210 |"
    assert f"{row} 98 % / 61 % | 0.8712 | yes |" in text
    assert text.index("Precision question") < text.index("A/A control") < text.index("Modelling")


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128", "GEMM"),
        ("nvjet_qqtst_128x128_e4m3_TNT", "FP8 GEMM"),
        ("_fused_forward_kernel", "fused GEMM chain"),
        (
            "triton_red_fused__to_copy_mul_3",
            "norms, activations, quantisation, the rest of Inductor",
        ),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("something_else", "other"),
    ],
)
def test_kernels_are_told_apart_by_name(kernel: str, kind: str) -> None:
    assert importlib.import_module("figure_11").kind_of(kernel) == kind
