"""Rows of our own kernels hang on the kernels' sources: they go stale with them, and only then."""

from __future__ import annotations

import functools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import loka_compile
import loka_compile.kernels as kernels
from loka_compile.lowering import cost_import
from loka_compile.lowering import cost_table
from loka_compile.lowering import own_version
from loka_compile.lowering.cost_store import CostTable
from loka_compile.lowering.cost_table import CostKey
from loka_compile.lowering.cost_table import CostRow
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.measure import price
from loka_compile.lowering.parts import Place
from loka_compile.lowering.recipes import DIRECTIONS

HERE = Path(next(iter(kernels.__path__)))
CPU = torch.device("cpu")
EPILOGUE = "block_norm:64:hard_swish"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HERE, tmp_path / "kernels"))


def digests(folder: Path) -> dict[str, str]:
    return {what: own_version.digest(folder, files) for what, files in own_version.ENTRIES.items()}


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def test_every_entry_is_a_kernel_with_what_it_imports() -> None:
    for entries in own_version.ENTRIES.values():
        assert "@triton.jit" in "".join(
            (HERE / f"{name}.py").read_text() for name in own_version.sources(HERE, entries)
        )
    assert {"fused_kernel", "launch", "tiles", "block_norm"} <= set(
        own_version.sources(HERE, ("fused_forward",))
    )


def test_an_edit_changes_the_kernels_that_run_it_and_no_other(copy: Path) -> None:
    before = digests(copy)
    append(copy / "fused_backward.py", "\nTILE = 3\n")
    after = digests(copy)
    assert [what for what in before if after[what] != before[what]] == ["gradient"]
    append(copy / "launch.py", "\nSTAGES = 3\n")
    assert all(digests(copy)[what] != after[what] for what in after)


def test_comments_and_blank_lines_change_nothing(copy: Path) -> None:
    before = digests(copy)
    for path in copy.glob("*.py"):
        append(path, "\n\n# Why this is so.\n")
    assert digests(copy) == before


@pytest.fixture
def other_kernels(copy: Path, monkeypatch: pytest.MonkeyPatch):
    """Call it: the forward kernel's source becomes another."""

    def edit() -> None:
        append(copy / "fused_kernel.py", "\nWARPS = 8\n")
        monkeypatch.setattr(kernels, "__path__", [str(copy)])
        for where, name in ((own_version, "own_version"), (cost_table, "version_of")):
            cached = getattr(where, name)
            monkeypatch.setattr(where, name, functools.cache(cached.__wrapped__))
        monkeypatch.setattr(cost_table, "own_version", own_version.own_version)
        monkeypatch.setattr(cost_import, "version_of", cost_table.version_of)

    return edit


def test_a_row_of_ours_goes_stale_with_the_kernel_and_can_be_stamped(other_kernels) -> None:
    place = Place(GemmShape(64, 64, 64, EPILOGUE), torch.bfloat16, CPU, epilogue=EPILOGUE)
    row = CostRow(place.key("fwd", "loka:rowwise"), 3.0, "2026-01-01")
    theirs = CostRow(place.key("fwd", "torch:rowwise"), 4.0, "2026-01-01")
    assert row.key.version.startswith(f"{loka_compile.__version__}+")
    assert row.why_stale() is None
    table = CostTable(None, [row, theirs])
    found = price("fwd", "loka:rowwise", place, tune="never", table=table)
    assert found is not None and found.us == 3.0
    other_kernels()
    assert "our own kernels" in str(row.why_stale())
    assert theirs.why_stale() is None
    assert price("fwd", "loka:rowwise", place, tune="never", table=table) is None
    again, same = cost_import.stamped([row, theirs])
    assert (again.why_stale(), again.us) == (None, 3.0)
    assert same is theirs


def test_rows_keyed_by_the_packages_version_alone_are_stale() -> None:
    key = CostKey.of("loka:rowwise", "fwd", 64, 64, 64, torch.bfloat16, CPU, epilogue=EPILOGUE)
    old = replace(key, version=loka_compile.__version__)
    assert CostRow(old, 3.0, "2026-01-01").why_stale() is not None


def test_directions_that_run_no_kernel_of_ours_have_a_version_too() -> None:
    assert len({own_version.own_version(d) for d in DIRECTIONS}) == 2
