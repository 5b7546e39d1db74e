"""``parquet:FILE``: any Parquet table with a small schema file beside it, streamed.

``clicks.parquet`` is described by ``clicks.schema.json``::

    {"label": "clicked",
     "categorical": {"user": 100000, "item": 50000},   # column -> most ids to keep apart
     "dense": ["age"], "counts": ["views"],            # counts are taken as log(1 + x)
     "history": ["user", "item"]}                      # optional: key and item of histories

``parquet:FILE,schema=OTHER`` takes the description from another place. Rows are used in file order,
which should be time order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from loka_compile.data.base import CategoricalField
from loka_compile.data.base import Chunk
from loka_compile.data.base import DataError
from loka_compile.data.base import OnBadRow
from loka_compile.data.base import Schema
from loka_compile.data.base import Source
from loka_compile.data.encode import DENSE_FORMS
from loka_compile.data.encode import Vocabulary
from loka_compile.data.encode import counts
from loka_compile.data.encode import log1p

CHUNK_ROWS = 8_192
_KEYS = {"label": str, "categorical": dict, "dense": list, "counts": list, "history": list}


class ParquetTable(Source):
    """Ids are numbered in order of first sight, as many as the schema file allows."""

    dense_forms = DENSE_FORMS

    def __init__(
        self,
        path: str | Path,
        label: str | None = None,
        on_bad_row: OnBadRow = "error",
        dense_form: str = "standard",
        schema: str | Path | None = None,
    ) -> None:
        self.path = Path(path)
        self.name = f"parquet:{self.path.name}"
        super().__init__(on_bad_row, dense_form)
        said = _schema_file(Path(schema or self.path.with_suffix(".schema.json")))
        try:
            self._file = pq.ParquetFile(self.path)
        except FileNotFoundError as e:
            raise DataError(f"parquet: {self.path}: no such file") from e
        except (pa.ArrowException, OSError) as e:
            raise DataError(f"{self.path}: is not a readable Parquet file ({e})") from e
        self._plain, self._counts = list(said.get("dense", [])), list(said.get("counts", []))
        fields = [CategoricalField(n, int(c)) for n, c in said.get("categorical", {}).items()]
        self.schema = Schema(
            tuple(fields), (*self._plain, *self._counts), label or str(said["label"])
        )
        self._columns = [*(f.name for f in fields), *self.schema.dense, self.schema.label]
        absent = [c for c in self._columns if c not in self._file.schema_arrow.names]
        if absent:
            raise DataError(f"{self.path}: no column {', '.join(absent)}; mend the schema file")
        if "history" in said:
            key, item = said["history"]
            self.history_fields = (key, item)
        self.rows = self._file.metadata.num_rows

    def _chunks(self) -> Iterator[Chunk]:
        vocabularies = [Vocabulary(f.cardinality) for f in self.schema.categorical]
        scaled = counts if self.dense_form == "raw" else log1p
        for batch in self._batches():
            first = self.counts.read
            self.counts.read += batch.num_rows
            label = _floats(batch[self.schema.label], self.path, self.schema.label)
            known = np.isfinite(label)
            self.counts.unlabelled += int((~known).sum())
            wrong = known & ~np.isin(label, (0.0, 1.0))
            for i in np.flatnonzero(wrong):
                row, value = first + int(i) + 1, label[i]
                name = self.schema.label
                self.bad_row(f"{self.path}, row {row}: {name} is {value:g}, want 0 or 1")
            keep = known & ~wrong
            if not keep.any():
                continue
            ids = [
                _encode(batch[f.name], v)
                for f, v in zip(self.schema.categorical, vocabularies, strict=True)
            ]
            self.counts.overflow = sum(v.overflow for v in vocabularies)
            dense = [
                *(_floats(batch[c], self.path, c).astype(np.float32) for c in self._plain),
                *(scaled(_floats(batch[c], self.path, c)) for c in self._counts),
            ]
            n = batch.num_rows
            yield Chunk(
                (np.stack(ids, axis=1) if ids else np.zeros((n, 0), np.int64))[keep],
                (np.stack(dense, axis=1) if dense else np.zeros((n, 0), np.float32))[keep],
                label[keep].astype(np.float32),
            )

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._file.iter_batches(batch_size=CHUNK_ROWS, columns=self._columns)
        except (pa.ArrowException, OSError) as e:
            raise DataError(f"{self.path}: damaged Parquet data ({e})") from e


def _schema_file(where: Path) -> dict[str, Any]:
    if not where.is_file():
        raise DataError(
            f"parquet: {where} is missing; it names the columns, as "
            '{"label": "y", "categorical": {"user": 1000}, "dense": ["x"]}'
        )
    try:
        said = json.loads(where.read_text(encoding="utf-8"))
    except ValueError as e:
        raise DataError(f"{where}: is no JSON ({e})") from e
    if not isinstance(said, dict) or "label" not in said:
        raise DataError(f"{where}: must be an object that names at least the label")
    for key, value in said.items():
        if key not in _KEYS:
            raise DataError(f"{where}: unknown key {key!r}; known: {', '.join(_KEYS)}")
        if not isinstance(value, _KEYS[key]):
            raise DataError(f"{where}: {key} must be a {_KEYS[key].__name__}")
    for name, size in said.get("categorical", {}).items():
        if not isinstance(size, int) or size < 2:
            raise DataError(f"{where}: {name} needs a number of ids of at least 2, not {size!r}")
    if "history" in said and len(said["history"]) != 2:
        raise DataError(f"{where}: history must name two columns, key and item")
    return said


def _floats(column: pa.Array, path: Path, name: str) -> np.ndarray:
    """float64 ``[n]``, NaN where null."""
    try:
        cast = column.cast(pa.float64())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as e:
        raise DataError(f"{path}: column {name} holds {column.type}, want numbers ({e})") from e
    return pc.fill_null(cast, float("nan")).to_numpy(zero_copy_only=False)


def _encode(column: pa.Array, vocabulary: Vocabulary) -> np.ndarray:
    """int64 ``[n]``, 0 where null; only the batch's different values go through Python."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    # Nulls after the values, so that the last code stands for them; order of first sight is kept.
    encoded = column.dictionary_encode()
    values = ["" if v is None else str(v) for v in encoded.dictionary.to_pylist()]
    codes = np.append(vocabulary.encode(values), 0)
    return codes[pc.fill_null(encoded.indices, len(values)).to_numpy(zero_copy_only=False)]
