"""CSV text -> blocks of columns, with the line number of every row kept for error messages."""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loka_compile.data.base import DataError
from loka_compile.data.encode import MISSING

BLOCK_ROWS = 16_384


@dataclass
class Block:
    """Some rows of a file: ``columns[name]`` holds raw strings, ``lines`` where they stand."""

    columns: dict[str, list[str]]
    lines: list[int]

    def __len__(self) -> int:
        return len(self.lines)

    def keep(self, mask: np.ndarray) -> Block:
        """The rows where ``mask`` (bool ``[n]``) holds."""
        if mask.all():
            return self
        index = np.flatnonzero(mask).tolist()
        columns = {name: [column[i] for i in index] for name, column in self.columns.items()}
        return Block(columns, [self.lines[i] for i in index])


@contextmanager
def _text(path: Path) -> Iterator[io.TextIOBase]:
    """A text stream over ``path``, or over the one member of ``path`` when that is a zip file."""
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
                if len(names) != 1:
                    raise DataError(f"{path}: holds {len(names)} files, expected one CSV file")
                with archive.open(names[0]) as raw:
                    yield io.TextIOWrapper(raw, encoding="utf-8", newline="")
        else:
            with path.open(encoding="utf-8", newline="") as text:
                yield text
    except FileNotFoundError as e:
        raise DataError(f"{path}: no such file") from e
    except (zipfile.BadZipFile, UnicodeDecodeError, OSError) as e:
        raise DataError(f"{path}: cannot be read ({e}); fetch the file again") from e


def read_blocks(
    path: Path,
    columns: Sequence[str],
    bad_row: Callable[[str], None],
    on_read: Callable[[int], None] = lambda n: None,
    block_rows: int = BLOCK_ROWS,
) -> Iterator[Block]:
    """Stream the named columns of a CSV file, ``block_rows`` at a time.

    A row with a wrong number of fields goes to ``bad_row("FILE, line N: ...")``, which raises or
    counts. ``on_read`` hears how many rows were seen, good or bad.
    """
    with _text(path) as text:
        reader = csv.reader(text)
        header = next(reader, None)
        if header is None:
            raise DataError(f"{path}: is empty, expected a header line")
        absent = [c for c in columns if c not in header]
        if absent:
            raise DataError(f"{path}, line 1: no column {', '.join(absent)} in the header")
        picks = [header.index(c) for c in columns]
        rows: list[list[str]] = []
        lines: list[int] = []
        seen = 0
        try:
            for row in reader:
                seen += 1
                if len(row) != len(header):
                    bad_row(
                        f"{path}, line {reader.line_num}: {len(row)} fields, expected {len(header)}"
                    )
                    continue
                rows.append(row)
                lines.append(reader.line_num)
                if len(rows) == block_rows:
                    on_read(seen)
                    seen = 0
                    yield _block(columns, picks, rows, lines)
                    rows, lines = [], []
        except csv.Error as e:
            raise DataError(f"{path}, line {reader.line_num}: {e}") from e
        on_read(seen)
        if rows:
            yield _block(columns, picks, rows, lines)


def _block(
    columns: Sequence[str], picks: list[int], rows: list[list[str]], lines: list[int]
) -> Block:
    turned = list(zip(*rows, strict=True))
    return Block({c: list(turned[p]) for c, p in zip(columns, picks, strict=True)}, lines)


def numbers(values: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Strings -> float64 ``[n]`` (NaN: missing or unreadable) and bool ``[n]`` (unreadable)."""
    try:
        # The fast way, for columns that have no gap and no fault.
        out = np.array(values, dtype=np.float64)
        return out, np.isinf(out)
    except ValueError:
        pass
    out = np.full(len(values), np.nan)
    wrong = np.zeros(len(values), dtype=bool)
    for i, value in enumerate(values):
        if value in MISSING:
            continue
        try:
            out[i] = float(value)
        except ValueError:
            wrong[i] = True
    wrong |= np.isinf(out)
    return out, wrong
