"""Whole files or none, and readable by others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loka_compile.files import replacing
from loka_compile.files import write_text


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = write_text(tmp_path / "deep" / "a.txt", "old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == ["a.txt"]


def test_the_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    ours = write_text(tmp_path / "ours", "x")
    assert ours.stat().st_mode == plain.stat().st_mode


def test_a_clone_as_the_working_folder_imports_whole() -> None:
    """`python -c` puts the folder it is started in before the installed package."""
    root = Path(__file__).parents[1]
    if not (root / "loka_compile").exists():
        pytest.skip("the tests stand alone here")
    code = "import loka_compile.passes, loka_compile.kernels; print(loka_compile.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(root / "loka_compile" / "__init__.py")
