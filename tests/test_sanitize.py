"""`benchmarks/sanitize.py` reads what compute-sanitizer says, with a stand-in for it."""

from __future__ import annotations

import importlib.util
import stat
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "sanitize.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="no benchmarks beside the tests")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("sanitize", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sanitizer(folder: Path, says: str, code: int) -> str:
    tool = folder / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\necho '{says}'\nexit {code}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return str(tool)


@pytest.mark.parametrize(
    ("says", "code", "clean"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0, True),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, True),
        ("========= ERROR SUMMARY: 10 errors", 99, False),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)", 99, False),
        # The kernel's own check failed, or nothing ran at all.
        ("AssertionError\n========= ERROR SUMMARY: 0 errors", 1, False),
        ("no GPU", 0, False),
    ],
)
def test_rows(script, tmp_path: Path, says: str, code: int, clean: bool) -> None:
    row = script.check(sanitizer(tmp_path, says, code), "memcheck", "fused_forward")
    assert row["clean"] is clean and row["exit_code"] == code
    assert bool(row["output"]) is not clean


def test_it_is_found(script, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert script.find_sanitizer(None) is None
    (tmp_path / "bin").mkdir()
    assert script.find_sanitizer(None) is None
    tool = sanitizer(tmp_path / "bin", "", 0)
    assert script.find_sanitizer(None) == tool
    assert script.find_sanitizer(str(tmp_path / "missing")) == tool


@pytest.mark.gpu
@pytest.mark.parametrize("which", range(23))
def test_every_case_agrees_with_its_reference(script, which: int) -> None:
    list(script.CASES.values())[which]()


def test_every_kernel_file_has_a_case(script) -> None:
    """A new Triton kernel has to be sanitised too."""
    kernels = Path(script.__file__).parents[1] / "kernels"
    with_kernels = {f.stem for f in kernels.glob("*.py") if "Launcher(" in f.read_text()}
    with_kernels |= {f.stem for f in kernels.glob("*.py") if "_kernel[" in f.read_text()}
    text = SCRIPT.with_name("sanitize_cases.py").read_text()
    for stem in with_kernels - {"launch"}:
        assert f"kernels.{stem} import" in text, stem
    assert len(script.CASES) == 23
