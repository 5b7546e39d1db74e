"""The user's rows in SQLite: several processes, damage, newer files, the layers of the table."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from loka_compile.errors import CostTableError
from loka_compile.lowering import cost_store
from loka_compile.lowering.cost_store import CostTable
from loka_compile.lowering.cost_store import Store
from loka_compile.lowering.cost_table import CostKey
from loka_compile.lowering.cost_table import CostRow

KEY = CostKey.of("torch:rowwise", "fwd", 128, 64, 32, torch.bfloat16, torch.device("cpu"))


def row(us: float = 3.0, **changes) -> CostRow:
    return CostRow(replace(KEY, **changes), us, "2026-01-01")


def test_rows_are_kept_replaced_and_found(tmp_path):
    store = Store(tmp_path / "deep" / "costs.sqlite")
    assert store.find(KEY) is None and store.rows() == []
    store.put([row(), row(4.0, handed=True)])
    assert store.find(KEY) == row()
    store.put([row(5.0)])
    assert Store(store.path).find(KEY) == row(5.0)
    assert sorted(store.rows(), key=lambda r: r.us) == [row(4.0, handed=True), row(5.0)]
    assert store.find(replace(KEY, torch="other")) is None


def test_the_users_rows_come_before_the_shipped_ones(tmp_path):
    store = Store(tmp_path / "costs.sqlite")
    shipped = [row(9.0), row(8.0, direction="wgrad")]
    table = CostTable(store, shipped)
    assert table.find(KEY) == row(9.0)
    table.put([row(1.0)])
    assert table.find(KEY) == row(1.0)
    assert {r.us for r in table.rows()} == {1.0, 8.0}


_WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from tests_row import KEY, CostRow, Store
number = int(sys.argv[2])
store = Store(Path(sys.argv[1]))
for i in range(20):
    store.put([CostRow(replace(KEY, k=number, n=i), 1.0 + i, "2026-01-01")])
    store.put([CostRow(replace(KEY, k=0, n=0), 1.0 + number, "2026-01-01")])
    assert store.find(replace(KEY, k=number, n=i)) is not None
"""


def test_many_processes_write_at_once(tmp_path):
    """All start on a file that does not exist: creation races too."""
    (tmp_path / "tests_row.py").write_text(
        "import torch\n"
        "from loka_compile.lowering.cost_store import Store\n"
        "from loka_compile.lowering.cost_table import CostKey, CostRow\n"
        "KEY = CostKey.of('torch:rowwise', 'fwd', 128, 64, 32, torch.bfloat16, "
        "torch.device('cpu'))\n"
    )
    path = tmp_path / "costs.sqlite"
    environment = {"PYTHONPATH": str(tmp_path)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path), str(number)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        for number in range(1, 4)
    ]
    for one in running:
        _, errors = one.communicate(timeout=120)
        assert one.returncode == 0, errors
    assert len(Store(path).rows()) == 3 * 20 + 1


def test_a_damaged_file_is_an_error_and_stays(tmp_path):
    path = tmp_path / "costs.sqlite"
    path.write_bytes(b"no database at all, but long enough to have a header" * 9)
    before = path.read_bytes()
    with pytest.raises(CostTableError, match="cannot be used"):
        Store(path).rows()
    with pytest.raises(CostTableError):
        Store(path).put([row()])
    assert path.read_bytes() == before


def test_a_newer_or_foreign_file_is_an_error_and_stays(tmp_path):
    newer = tmp_path / "newer.sqlite"
    Store(newer).put([row()])
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(CostTableError, match="version 99"):
        Store(newer).put([row(7.0)])
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE theirs (a)")
    with pytest.raises(CostTableError, match="another program"):
        Store(foreign).put([row()])
    with sqlite3.connect(foreign) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]


def test_where_the_table_is(tmp_path, monkeypatch):
    monkeypatch.setenv("LOKA_CACHE", str(tmp_path))
    assert cost_store.default_path() == tmp_path / "costs.sqlite"
    table = cost_store.default_table()
    table.put([row()])
    assert cost_store.default_table().find(KEY) == row()
    monkeypatch.delenv("LOKA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert cost_store.default_path() == tmp_path / "xdg" / "loka-compile" / "costs.sqlite"


def test_a_damaged_table_does_not_stop_a_compile(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("LOKA_CACHE", str(tmp_path))
    (tmp_path / "costs.sqlite").write_bytes(b"garbage" * 100)
    table = cost_store.default_table()
    table.put([row()])
    assert table.find(KEY) is None or table.find(KEY).origin == "shipped"
    assert "costs.sqlite" in caplog.text
