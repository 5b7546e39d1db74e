"""Whole files or none, and readable by others."""

from __future__ import annotations

import os
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
