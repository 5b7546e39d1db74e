"""``criteo:FILE``: the layout of the Criteo Kaggle and Terabyte logs, streamed.

Tab-separated, no header, plain or .gz: label, 13 integers, 26 categories in hexadecimal; any field
but the label may be empty. The data are the user's own: nothing is shipped or fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from loka_compile.data.base import CategoricalField
from loka_compile.data.base import Chunk
from loka_compile.data.base import DataError
from loka_compile.data.base import OnBadRow
from loka_compile.data.base import Schema
from loka_compile.data.base import Source
from loka_compile.data.csv_stream import numbers
from loka_compile.data.encode import DENSE_FORMS
from loka_compile.data.encode import counts
from loka_compile.data.encode import log1p

INTEGERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
#: Ids per field. A category's own number, which is a hash already, modulo this; 0 for a gap.
BUCKETS = 100_000
BLOCK_BYTES = 4 << 20


class Criteo(Source):
    """Rows in file order, which is time order in both logs."""

    name = "criteo"
    history_fields = None
    dense_forms = DENSE_FORMS
    schema = Schema(tuple(CategoricalField(c, BUCKETS) for c in CATEGORIES), INTEGERS, "label")

    def __init__(
        self, path: str | Path, on_bad_row: OnBadRow = "error", dense_form: str = "standard"
    ) -> None:
        super().__init__(on_bad_row, dense_form)
        self.path = Path(path)
        if not self.path.is_file():
            raise DataError(f"criteo: {self.path}: no such file")
        self._wrong_width: list[Any] = []

    def _blocks(self) -> Iterator[pa.RecordBatch]:
        def invalid(row: Any) -> str:
            self._wrong_width.append(row)
            return "skip"

        names = ["label", *INTEGERS, *CATEGORIES]
        try:
            # One thread: only then are the numbers of faulty lines known.
            yield from csv.open_csv(
                self.path,
                csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES, column_names=names),
                csv.ParseOptions(delimiter="\t", quote_char=False, invalid_row_handler=invalid),
                csv.ConvertOptions(
                    column_types=dict.fromkeys(names, pa.string()),
                    null_values=[""],
                    strings_can_be_null=True,
                ),
            )
        except (pa.ArrowException, OSError) as e:
            raise DataError(f"{self.path}: cannot be read ({e}); fetch the file again") from e

    def _chunks(self) -> Iterator[Chunk]:
        self._wrong_width = []
        form = counts if self.dense_form == "raw" else log1p
        line = 0
        for block in self._blocks():
            skipped = self._faulty_lines()
            self.counts.read += block.num_rows + skipped
            good = np.ones(block.num_rows, dtype=bool)
            label = self._numbers(block, "label", good, line, ("0", "1"))
            dense = [self._numbers(block, name, good, line) for name in INTEGERS]
            ids = [self._ids(block, name, good, line) for name in CATEGORIES]
            line += block.num_rows + skipped
            yield Chunk(
                np.stack(ids, axis=1)[good],
                form(np.stack(dense, axis=1))[good],
                label[good].astype(np.float32),
            )
        self.counts.read += self._faulty_lines()

    def _faulty_lines(self) -> int:
        faulty, self._wrong_width = self._wrong_width, []
        for row in faulty:
            where = f"line {row.number}" if row.number is not None else repr(row.text[:40])
            self.bad_row(
                f"{self.path}, {where}: {row.actual_columns} fields, "
                f"expected {row.expected_columns}"
            )
        return len(faulty)

    def _refuse(self, wrong: np.ndarray, column: pa.Array, name: str, want: str, line: int) -> None:
        for i in np.flatnonzero(wrong):
            # Lines before this block that had another number of fields are counted too.
            self.bad_row(f"{self.path}, line {line + i + 1}: {name} is {column[i]}, want {want}")

    def _numbers(
        self,
        block: pa.RecordBatch,
        name: str,
        good: np.ndarray,
        line: int,
        only: tuple[str, ...] = (),
    ) -> np.ndarray:
        """float64 ``[n]``, NaN for a gap; clears ``good`` where the field cannot be read."""
        column = block.column(name)
        if only:
            wrong = ~pc.fill_null(pc.is_in(column, pa.array(only)), False).to_numpy(False)
            self._refuse(wrong & good, column, name, " or ".join(only), line)
            good &= ~wrong
            column = pc.if_else(pa.array(~wrong), column, None)
        try:
            return pc.fill_null(column.cast(pa.float64()), float("nan")).to_numpy()
        except pa.ArrowInvalid:
            values, wrong = numbers(["" if v is None else v for v in column.to_pylist()])
            self._refuse(wrong & good, column, name, "a number", line)
            good &= ~wrong
            return np.where(wrong, np.nan, values)

    def _ids(self, block: pa.RecordBatch, name: str, good: np.ndarray, line: int) -> np.ndarray:
        """int64 ``[n]`` in 0..BUCKETS-1, 0 for a gap."""
        encoded = block.column(name).dictionary_encode()
        known = np.zeros(len(encoded.dictionary) + 1, dtype=np.int64)
        for i, value in enumerate(encoded.dictionary.to_pylist()):
            try:
                known[i] = int(value, 16) % (BUCKETS - 1) + 1
            except ValueError:
                known[i] = -1
        ids = known[pc.fill_null(encoded.indices, len(known) - 1).to_numpy(False)]
        wrong = ids < 0
        self._refuse(wrong & good, block.column(name), name, "a hexadecimal number", line)
        good &= ~wrong
        return np.where(wrong, 0, ids)
