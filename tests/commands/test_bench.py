"""`loka bench` without a GPU: import, export, show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from loka_compile.cli import app
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
    assert RUNNER.invoke(app, ["bench", "--import", str(out)]).exit_code == 0
    shown = RUNNER.invoke(app, ["bench"]).output
    assert "torch:rowwise 2.11.0" in shown
    assert ("stale: measured with torch 2.11.0" in shown) is (torch.__version__ != "2.11.0")


def test_a_damaged_table_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOKA_CACHE", str(tmp_path))
    (tmp_path / "costs.sqlite").write_bytes(b"garbage" * 100)
    got = RUNNER.invoke(app, ["bench"])
    assert got.exit_code == 2 and "costs.sqlite" in got.stderr
