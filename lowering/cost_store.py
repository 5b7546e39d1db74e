"""The user's cost rows: SQLite in the user's cache, safe for many processes; and the whole table.

A file that is damaged, of another program or of a newer version is an error and stays as it is.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sqlite3
import time
from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import astuple
from dataclasses import replace
from pathlib import Path
from typing import Any

from loka_compile import _compat
from loka_compile.errors import CostTableError
from loka_compile.lowering.cost_table import CostKey
from loka_compile.lowering.cost_table import CostRow
from loka_compile.lowering.cost_table import row_of
from loka_compile.lowering.cost_table import shipped_rows
from loka_compile.lowering.estimator import Fit
from loka_compile.lowering.estimator import fit_rows
from loka_compile.options import Environment

log = logging.getLogger("loka_compile")

VERSION = 1
#: "LoKA" in the header of the file: tells our database from anybody else's.
APPLICATION = 0x4C6F4B41
#: Seconds that a process waits for another one's write.
BUSY = 30.0
#: A fit holds until there are so many times the rows.
GROWN = 1.1

_COLUMNS = {
    "device": "TEXT",
    "direction": "TEXT",
    "m": "INTEGER",
    "k": "INTEGER",
    "n": "INTEGER",
    "dtype": "TEXT",
    "library": "TEXT",
    "recipe": "TEXT",
    "version": "TEXT",
    "torch": "TEXT",
    "layout": "TEXT",
    "epilogue": "TEXT",
    "handed": "INTEGER",
}
_NAMES = ", ".join(_COLUMNS)
_CREATE = (
    "CREATE TABLE costs ("
    + ", ".join(f"{name} {kind} NOT NULL" for name, kind in _COLUMNS.items())
    + f", us REAL NOT NULL CHECK (us > 0), date TEXT NOT NULL, PRIMARY KEY ({_NAMES}))"
)
_UPSERT = (
    f"INSERT INTO costs ({_NAMES}, us, date) VALUES ({', '.join('?' * (len(_COLUMNS) + 2))}) "
    f"ON CONFLICT ({_NAMES}) DO UPDATE SET us = excluded.us, date = excluded.date"
)
_FIND = "SELECT us, date FROM costs WHERE " + " AND ".join(f"{name} = ?" for name in _COLUMNS)


class Store:
    """Rows in one SQLite file. A connection per operation: threads and forks need no care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find(self, key: CostKey) -> CostRow | None:
        if not self.path.exists():
            return None
        with self._open() as connection:
            held = connection.execute(_FIND, astuple(key)).fetchone()
        return None if held is None else CostRow(key, held[0], held[1])

    def rows(self) -> list[CostRow]:
        if not self.path.exists():
            return []
        with self._open() as connection:
            found = connection.execute(f"SELECT {_NAMES}, us, date FROM costs").fetchall()
        rows = []
        for values in found:
            data = dict(zip([*_COLUMNS, "us", "date"], values, strict=True))
            rows.append(row_of({**data, "handed": bool(data["handed"])}))
        return rows

    def put(self, rows: Iterable[CostRow]) -> None:
        """Add rows; a row of the same key is replaced."""
        values = [(*astuple(r.key), r.us, r.date) for r in rows]
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(_UPSERT, values)
            connection.execute("COMMIT")

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.closing(
                sqlite3.connect(self.path, timeout=BUSY, isolation_level=None)
            ) as connection:
                self._check(connection)
                yield connection
        except sqlite3.Error as error:
            raise CostTableError(self.path, f"cannot be used ({error})") from error
        except OSError as error:
            raise CostTableError(self.path, f"cannot be opened ({error.strerror})") from error

    def _check(self, connection: sqlite3.Connection) -> None:
        version, application = _header(connection)
        if version == 0 and application == 0:
            self._create(connection)
        elif application != APPLICATION:
            raise CostTableError(self.path, "a database of another program")
        elif version > VERSION:
            raise CostTableError(
                self.path, f"version {version}, this loka-compile reads up to {VERSION}; upgrade it"
            )

    def _create(self, connection: sqlite3.Connection) -> None:
        # Nothing is written before we know that the file holds nothing.
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise CostTableError(self.path, "a database of another program")
        _use_wal(connection)
        connection.execute("BEGIN IMMEDIATE")
        try:
            if _header(connection) == (0, 0):  # else another process was first
                connection.execute(_CREATE)
                connection.execute(f"PRAGMA application_id = {APPLICATION}")
                connection.execute(f"PRAGMA user_version = {VERSION}")
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise


def _header(connection: sqlite3.Connection) -> tuple[int, int]:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    return int(version), int(connection.execute("PRAGMA application_id").fetchone()[0])


def _use_wal(connection: sqlite3.Connection) -> None:
    """Readers then never wait for a writer. The switch itself does not honour the busy timeout."""
    deadline = time.monotonic() + BUSY
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


class CostTable:
    """The user's rows over the shipped ones."""

    def __init__(self, store: Store | None, shipped: Iterable[CostRow] = ()) -> None:
        self.store = store
        self._shipped = {row.key: row for row in shipped}
        self._families: dict[tuple[Any, ...], list[CostRow]] | None = None
        #: Family -> the rows that there were, and the fit to them.
        self._fits: dict[tuple[Any, ...], tuple[int, Fit | None]] = {}

    def find(self, key: CostKey) -> CostRow | None:
        held = self.store.find(key) if self.store is not None else None
        return held if held is not None else self._shipped.get(key)

    def rows(self) -> list[CostRow]:
        """Every row, stale ones too; the user's where both have one."""
        own = self.store.rows() if self.store is not None else []
        return list({**self._shipped, **{row.key: row for row in own}}.values())

    def put(self, rows: Iterable[CostRow]) -> None:
        """Add rows. A fit is made anew once its kernel has a tenth more of them."""
        rows = list(rows)
        if self.store is not None:
            self.store.put(rows)
        families = self._by_family()
        for row in rows:
            family = row.key.family()
            held = families.get(family, [])
            families[family] = [*(r for r in held if r.key != row.key), row]
            count, fit = self._fits.get(family, (0, None))
            if fit is None or len(families[family]) > GROWN * count:
                self._fits.pop(family, None)

    def family(self, key: CostKey) -> list[CostRow]:
        """Rows of the same kernel on the same device, at any shape and of any version."""
        return self._by_family().get(key.family(), [])

    def _by_family(self) -> dict[tuple[Any, ...], list[CostRow]]:
        if self._families is None:
            self._families = {}
            for row in self.rows():
                self._families.setdefault(row.key.family(), []).append(row)
        return self._families

    def points(self, key: CostKey) -> dict[int, float]:
        """M -> microseconds, of the rows that differ from `key` in M alone."""
        return {r.key.m: r.us for r in self.family(key) if replace(r.key, m=key.m) == key}

    def fit(self, key: CostKey) -> Fit | None:
        """The estimator of the kernel that `key` names, fitted to the rows of its family."""
        family = key.family()
        if family not in self._fits:
            sms, rows = _compat.multiprocessors(key.device), self.family(key)
            self._fits[family] = len(rows), fit_rows(rows, sms)
        return self._fits[family][1]


@functools.cache
def _table_at(path: Path) -> CostTable:
    store: Store | None = Store(path)
    try:
        assert store is not None
        store.rows()
    except CostTableError as error:
        # A compile must not fail because of this; `loka bench`, which opens the file, says it too.
        log.warning("loka: %s; costs are measured without it", error)
        store = None
    return CostTable(store, shipped_rows())


def default_table() -> CostTable:
    """The table in force: `$LOKA_CACHE` or the user's cache, over the shipped rows."""
    return _table_at(default_path())


def default_path() -> Path:
    return Environment.read().cache / "costs.sqlite"
