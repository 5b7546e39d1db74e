"""``loka compare``: one small real study on a CPU, and its mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from loka_compile.cli import app
from loka_compile.train.show_study import show

RUNNER = CliRunner()
DATA = ["--data", "synthetic:rows=2560,fields=4,dense=3"]


def test_a_study_from_start_to_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Everything but Inductor's code: that is tested where it is written.
    compile_ = torch.compile

    def quick(module: Any, backend: str, options: Any = None) -> Any:
        if backend == "inductor":
            return module
        return compile_(module, backend=backend, options={**options, "inner": "eager"})

    monkeypatch.setattr(torch, "compile", quick)
    sizes = ["--model", "dlrm", "--batch", "128", "--windows", "4", "--seeds", "2"]
    where = ["--out", str(tmp_path / "s"), "--json", str(tmp_path / "r.json")]
    arms = "bf16_mods,loka,control,original,fp8_all_mods"
    got = RUNNER.invoke(app, ["compare", *DATA, *sizes, *where, "--arms", arms])
    assert got.exit_code == 0, got.output
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["missing"] == result["faults"] == []
    assert [p["seed"] for p in result["pairs"]] == [0, 1]
    assert all(len(p["windows"]) == 4 for p in result["pairs"])
    for key in ("mean", "ci95", "window_upper95", "aa_control", "fp8_share", "modelling"):
        assert result[key] is not None, key
    assert (result["variant"], result["base"]) == ("loka", "bf16_mods")
    assert (result["modelling"]["variant"], result["modelling"]["base"]) == (
        "bf16_mods",
        "original",
    )
    assert result["against_original"]["fp8_all_mods"]["pairs"]
    assert 0 < result["fp8_share"]["loka"]["flops"] <= 1
    # Rounding to FP8 is seen, and is small.
    assert 0 < abs(result["pairs"][0]["rll_percent"]) < 2
    assert result["data"]["synthetic"] and "SYNTHETIC" in got.output
    assert "expected" in result
    assert result["given_up"] == {}
    lost = {"loka": ["head.0 dgrad: torch:rowwise failed at run time: [out] of memory"]}
    console = Console(record=True, width=200)
    show(console, {**result, "given_up": lost})
    assert "loka gave FP8 up at run time in so many directions: 1," in (
        said := console.export_text()
    )
    assert "the first: head.0 dgrad: torch:rowwise failed at run time: [out] of memory" in said
    assert (tmp_path / "r.svg").is_file() or "matplotlib is not installed" in got.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "lokka"], "unknown arm 'lokka'"),
        (["--seeds", "0"], "--seeds is 0"),
        (["--model", "dcn"], "unknown model 'dcn'; use one of wukong"),
        (["--dense", "rare"], "no dense form 'rare'"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    got = RUNNER.invoke(app, ["compare", *DATA, "--out", str(tmp_path), *arguments])
    assert got.exit_code == 2
    assert message in got.stderr
    assert got.stderr.count("\n") == 1
