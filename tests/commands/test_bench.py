"""`loka bench` without a GPU: import, export, show."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from loka_compile.cli import app
from loka_compile.commands import bench
from loka_compile.lowering.cost_table import import_rows

RUNNER = CliRunner()


def test_a_benchmark_becomes_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOKA_CACHE", str(tmp_path / "cache"))
    row = {"library": "torch", "recipe": "rowwise", "direction": "fwd", "M": 64, "K": 32, "N": 16}
    env = {"device": "NVIDIA H200 sm90", "torch": "2.11.0", "date": "2026-11-30"}
    gemm = tmp_path / "gemm.json"
    gemm.write_text(json.dumps({"env": env, "rows": [{**row, "total_us": 3.0}]}))
    out = tmp_path / "costs.json"
    arguments = ["bench", "--import", str(gemm), "--export", str(out), "--imported-only"]
    got = RUNNER.invoke(app, arguments)
    assert got.exit_code == 0, got.output
    assert [r.us for r in import_rows(out)] == [3.0]
    # Kernels alone come along; rows of another file stay, and the later file wins.
    newer = tmp_path / "newer.json"
    newer.write_text(json.dumps({"env": env, "rows": [{**row, "total_us": 4.0, "gemm_us": 2.0}]}))
    more = ["bench", "--import", str(out), "--import", str(newer), "--imported-only"]
    got = RUNNER.invoke(app, [*more, "--export", str(out)])
    assert got.exit_code == 0, got.output
    assert {(r.key.epilogue, r.us) for r in import_rows(out)} == {("", 4.0), ("gemm", 2.0)}
    assert RUNNER.invoke(app, ["bench", "--import", str(out)]).exit_code == 0
    shown = RUNNER.invoke(app, ["bench"]).output
    assert "torch:rowwise 2.11.0" in shown
    assert ("stale: measured with torch 2.11.0" in shown) is (torch.__version__ != "2.11.0")


def test_rows_of_our_own_kernels_are_stamped_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LOKA_CACHE", str(tmp_path / "cache"))
    from loka_compile.lowering import cost_table

    key = cost_table.CostKey.of(
        "loka:rowwise", "fwd", 64, 64, 64, torch.bfloat16, torch.device("cpu"), epilogue="?"
    )
    old = cost_table.CostRow(replace(key, version="0.1.0"), 3.0, "2026-01-01")
    file = cost_table.export_rows([old], tmp_path / "costs.json")
    arguments = ["bench", "--import", str(file), "--imported-only", "--export", str(file)]
    for more, stale in (([], True), (["--stamp"], False)):
        got = RUNNER.invoke(app, [*arguments, *more])
        assert got.exit_code == 0, got.output
        (row,) = import_rows(file)
        assert (row.why_stale() is not None) is stale
        assert row.us == 3.0


def test_a_damaged_table_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOKA_CACHE", str(tmp_path))
    (tmp_path / "costs.sqlite").write_bytes(b"garbage" * 100)
    got = RUNNER.invoke(app, ["bench"])
    assert got.exit_code == 2 and "costs.sqlite" in got.stderr


@pytest.fixture
def as_if_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every library runs, and a part's time is the number of parts timed before it."""
    from loka_compile import _compat
    from loka_compile.lowering import fill
    from loka_compile.lowering import measure
    from loka_compile.lowering.libraries import LIBRARIES

    monkeypatch.setenv("LOKA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bench, "_gpu", lambda: torch.device("cuda"))
    monkeypatch.setattr(fill, "MEMORY_SIZES", ((256, 1024),))
    monkeypatch.setattr(_compat, "device_key", lambda device: "some GPU sm90")
    for library in LIBRARIES.values():
        monkeypatch.setattr(library, "why_unavailable", lambda device: None, raising=False)
        monkeypatch.setattr(library, "why_no_recipe", lambda recipe, device: None, raising=False)
    timed: list[Any] = []

    def time_us(key: Any, *_: Any) -> float:
        timed.append(key)
        return float(len(timed))

    monkeypatch.setattr(measure, "time_us", time_us)
    return timed


def _rows() -> list[Any]:
    from loka_compile.lowering.cost_store import default_table

    return [r for r in default_table().rows() if r.origin == "user"]


def test_a_models_sites_are_filled_and_a_second_run_goes_on(as_if_on_a_gpu: list[Any]):
    arguments = ["bench", "--model", "wukong:tiny", "--batch", "64", "--libraries", "loka,torch"]
    stopped = RUNNER.invoke(app, [*arguments, "--seconds", "0"])
    assert stopped.exit_code == 0 and "time is spent" in stopped.output, stopped.output
    got = RUNNER.invoke(app, arguments)
    assert got.exit_code == 0 and "time is spent" not in got.output, got.output
    rows = _rows()
    assert len(rows) == len(as_if_on_a_gpu) == len(set(as_if_on_a_gpu)) > 50
    of = {d: [r.key for r in rows if r.key.direction == d] for d in ("fwd", "wgrad", "gradient")}
    assert all(k.epilogue.startswith("gemm") for k in of["fwd"] + of["wgrad"])
    assert {k.kernel for k in of["wgrad"]} == {
        "high_precision", "torch:tensorwise", "torch:rowwise", "torch:blockwise",
    }  # fmt: skip
    # Our own kernel, with all that it may hand on.
    assert {k.epilogue.partition("+")[0] for k in of["fwd"] if k.library == "loka"} == {
        "gemm>y", "gemm>y8", "gemm>y8t",
    }  # fmt: skip
    assert {k.library for k in of["gradient"]} == {"torch", "loka"}
    again = RUNNER.invoke(app, arguments)
    assert again.exit_code == 0 and "0 timed" in again.output, again.output


def test_reports_and_lists_of_shapes_are_filled(as_if_on_a_gpu: list[Any], tmp_path: Path):
    report, shapes = tmp_path / "report.json", tmp_path / "shapes.json"
    site = {"name": "mlp.0", "M": 64, "K": 128, "N": 256, "dtype": "bfloat16"}
    chain = "mlp.0+block_norm+hard_swish"
    report.write_text(json.dumps({"sites": [{**site, "fused": chain}, {**site, "fused": None}]}))
    shapes.write_text("[[32, 64, 48]]")
    only = ["--libraries", "loka,torch"]
    got = RUNNER.invoke(app, ["bench", "--from-report", str(report), *only])
    assert got.exit_code == 0, got.output
    found = {r.key.epilogue for r in _rows() if r.key.library == "loka"}
    assert "gemm>y8+block_norm:256:hard_swish+gain" in found
    got = RUNNER.invoke(app, ["bench", "--shapes", str(shapes), *only])
    assert got.exit_code == 0, got.output
    assert {(r.key.k, r.key.n) for r in _rows() if r.key.direction == "fwd"} == {
        (128, 256), (64, 48),
    }  # fmt: skip
    for wrong in ('{"sites": [{"M": 1}]}', "[]", "nothing"):
        report.write_text(wrong)
        got = RUNNER.invoke(app, ["bench", "--from-report", str(report)])
        assert got.exit_code == 2 and "report.json" in got.stderr, got.output


def test_what_cannot_be_filled_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOKA_CACHE", str(tmp_path))
    got = RUNNER.invoke(app, ["bench", "--model", "wukong:tiny"])
    if not torch.cuda.is_available():
        assert got.exit_code == 2 and "no CUDA device" in got.output
    monkeypatch.setattr(bench, "_gpu", lambda: torch.device("cuda"))
    for arguments in (["--model", "wukon"], ["--model", "wukong", "--params", "bf17"]):
        got = RUNNER.invoke(app, ["bench", *arguments])
        assert got.exit_code == 2 and "unknown" in got.output + got.stderr
