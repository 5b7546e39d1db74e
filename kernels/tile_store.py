"""Measured tiles: rows shipped with the package, and the user's own in SQLite in the user's cache.

A row belongs to a device and a minor version of Triton: another compiler may need other tiles, or
run out of shared memory. A file that cannot be read costs a warning, once, and the default tiles.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import sqlite3
from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import asdict
from dataclasses import astuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from loka_compile import _compat
from loka_compile.kernels.tiles import Config
from loka_compile.options import user_cache

log = logging.getLogger("loka_compile")

KIND, VERSION = "loka-tiles", 1
#: "LoKT" in the header of the file: tells our database from anybody else's.
APPLICATION = 0x4C6F4B54
#: Seconds that a process waits for another one's write.
BUSY = 30.0


@dataclass(frozen=True)
class TileKey:
    """M is a bucket; `form`: see `tiles.form_of`."""

    device: str
    triton: str
    m: int
    n: int
    k: int
    block: int
    form: str

    @classmethod
    def of(cls, m: int, n: int, k: int, block: int, form: str, device: torch.device) -> TileKey:
        return cls(_compat.device_key(device), triton_release(), bucket(m), n, k, block, form)


@dataclass(frozen=True)
class Tile:
    key: TileKey
    config: Config
    us: float
    date: str

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self.key), **asdict(self.config), "us": self.us, "date": self.date}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Tile:
        """Raises KeyError or TypeError for what is no row."""
        key = TileKey(**{name: data[name] for name in TileKey.__dataclass_fields__})
        config = Config(**{name: int(data[name]) for name in Config.__dataclass_fields__})
        return cls(key, config, float(data["us"]), str(data["date"]))


def triton_release() -> str:
    return ".".join(triton.__version__.split(".")[:2])


def bucket(m: int) -> int:
    """The M that stands for `m`: the next of four steps per octave, as in the cost table."""
    if m <= 64:
        return 64
    step = 1 << ((m - 1).bit_length() - 3)
    return -(-m // step) * step


# -- the user's file ------------------------------------------------------------------------------

_COLUMNS = tuple(TileKey.__dataclass_fields__)
_CONFIG = tuple(Config.__dataclass_fields__)
_ALL = ", ".join((*_COLUMNS, *_CONFIG, "us", "date"))
_CREATE = (
    f"CREATE TABLE IF NOT EXISTS tiles ({', '.join(f'{c} NOT NULL' for c in _COLUMNS)}, "
    f"{', '.join(f'{c} INTEGER NOT NULL' for c in _CONFIG)}, us REAL NOT NULL, "
    f"date TEXT NOT NULL, PRIMARY KEY ({', '.join(_COLUMNS)}))"
)
_PUT = f"INSERT OR REPLACE INTO tiles ({_ALL}) VALUES ({', '.join('?' * len(_ALL.split(', ')))})"


def path() -> Path:
    return user_cache() / "tiles.sqlite"


def put(rows: Iterable[Tile]) -> None:
    """Add the user's rows; a row of the same key is replaced. Raises sqlite3.Error or OSError."""
    values = [(*astuple(r.key), *astuple(r.config), r.us, r.date) for r in rows]
    path().parent.mkdir(parents=True, exist_ok=True)
    with _open(path()) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(_CREATE)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.executemany(_PUT, values)
        connection.execute("COMMIT")
    _table.cache_clear()
    from loka_compile.kernels.fused_forward import RECIPES
    from loka_compile.kernels.tiles import config_for

    config_for.cache_clear()
    RECIPES.clear()


def user_rows() -> list[Tile]:
    """Raises sqlite3.Error for a file that is not ours, newer or damaged."""
    if not path().exists():
        return []
    with _open(path()) as connection:
        found = connection.execute(f"SELECT {_ALL} FROM tiles").fetchall()
    names = _ALL.split(", ")
    return [Tile.from_dict(dict(zip(names, values, strict=True))) for values in found]


@contextlib.contextmanager
def _open(file: Path) -> Iterator[sqlite3.Connection]:
    """A connection per operation: threads and forks need no care."""
    with contextlib.closing(
        sqlite3.connect(file, timeout=BUSY, isolation_level=None)
    ) as connection:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        empty = not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if version > VERSION or (application != APPLICATION and not empty):
            raise sqlite3.DatabaseError("of another program, or of a newer version")
        yield connection


# -- all rows -------------------------------------------------------------------------------------


def read_json(file: Path) -> list[Tile]:
    """Rows of a file that `write_json` wrote. Raises ValueError for anything else."""
    data = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.get("kind") != KIND or data.get("version") != VERSION:
        raise ValueError(f"{file}: not a table of tiles of version {VERSION}")
    return [Tile.from_dict(row) for row in data["rows"]]


def write_json(rows: Iterable[Tile], file: Path) -> None:
    """One row a line, sorted."""
    from loka_compile.files import write_text

    lines = sorted(json.dumps(row.to_dict()) for row in rows)
    head = json.dumps({"kind": KIND, "version": VERSION})[:-1]
    write_text(file, head + ', "rows": [\n' + ",\n".join(lines) + "\n]}\n")


def shipped_rows() -> list[Tile]:
    files = sorted(Path(__file__).parent.glob("tiles_*.json"))
    return [row for file in files for row in read_json(file)]


#: All of a key but M.
Family = tuple[str, str, int, int, int, str]


def _family(key: TileKey) -> Family:
    return key.device, key.triton, key.n, key.k, key.block, key.form


@functools.cache
def _table(file: Path) -> dict[Family, dict[int, Config]]:
    rows = shipped_rows()
    try:
        rows += user_rows()
    except (sqlite3.Error, OSError, KeyError, TypeError, ValueError) as error:
        log.warning("loka: %s cannot be read (%s); tiles are chosen without it", file, error)
    table: dict[Family, dict[int, Config]] = {}
    for row in rows:
        table.setdefault(_family(row.key), {})[row.key.m] = row.config
    return table


def find(m: int, n: int, k: int, block: int, form: str, device: torch.device) -> Config | None:
    """The config measured for M's bucket, else for the nearest M within an octave; else None."""
    key = TileKey.of(m, n, k, block, form, device)
    held = _table(path()).get(_family(key), {})
    if key.m in held:
        return held[key.m]
    near = min(held, key=lambda other: abs(math.log2(other / key.m)), default=None)
    return held[near] if near is not None and key.m / 2 <= near <= key.m * 2 else None
