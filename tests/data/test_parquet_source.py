"""Any Parquet table by its schema file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loka_compile.data import DataError
from loka_compile.data import open_source

SCHEMA = {
    "label": "y",
    "categorical": {"user": 4, "city": 10},
    "dense": ["age"],
    "counts": ["views"],
    "history": ["user", "city"],
}


def write(folder: Path, schema: Any = SCHEMA, **change: Any) -> Path:
    columns = {
        "user": [7, 8, 9, 10, 7],
        "city": pa.array(["a", None, "b", "a", "b"]).dictionary_encode(),
        "age": [1.0, None, 3.0, 4.0, 5.0],
        "views": [0, 9, 99, -1, 10**6],
        "y": [0, 1, None, 1, 0],
        **change,
    }
    pq.write_table(pa.table(columns), folder / "t.parquet")
    (folder / "t.schema.json").write_text(json.dumps(schema))
    return folder / "t.parquet"


def test_values_arrive(tmp_path: Path) -> None:
    source = open_source(f"parquet:{write(tmp_path)}", dense="raw")
    source.attach_history(2)
    batch = next(source.batches(10))
    assert batch.label.tolist() == [0, 1, 1, 0]
    # Three users are told apart from unknown; the fourth is beyond the bound.
    assert batch.categorical.tolist() == [[1, 1], [2, 0], [0, 1], [1, 2]]
    assert batch.dense.tolist() == [[1, 0], [0, 9], [4, 0], [5, 1e6]]
    assert batch.history is not None
    assert batch.history.tolist() == [[0, 0], [0, 0], [0, 0], [0, 1]]
    counts = source.counts
    assert (counts.read, counts.emitted, counts.unlabelled, counts.overflow) == (5, 4, 1, 1)


def test_counts_are_logarithms_and_another_label(tmp_path: Path) -> None:
    path = write(tmp_path, bought=[True, False, True, False, True])
    source = open_source(f"parquet:{path}", label="bought", dense="log")
    batch = next(source.batches(10))
    assert batch.label.tolist() == [1, 0, 1, 0, 1]
    np.testing.assert_allclose(batch.dense[:, 1], np.log1p([0, 9, 99, 0, 10**6]), rtol=1e-6)


def test_a_schema_from_another_place(tmp_path: Path) -> None:
    path = write(tmp_path)
    other = (tmp_path / "t.schema.json").rename(tmp_path / "other.json")
    source = open_source(f"parquet:{path},schema={other}")
    assert source.name == "parquet:t.parquet"
    assert len(next(source.batches(10)).label) == 4
    with pytest.raises(DataError, match=r"gone\.json is missing"):
        open_source(f"parquet:{path},schema={tmp_path / 'gone.json'}")


@pytest.mark.parametrize(
    ("schema", "change", "message"),
    [
        ({"label": "y", "categorical": {"who": 3}}, {}, "no column who"),
        ({"categorical": {}}, {}, "names at least the label"),
        ({"label": "y", "ids": []}, {}, "unknown key 'ids'"),
        ({"label": "y", "dense": "age"}, {}, "dense must be a list"),
        ({"label": "y", "categorical": {"user": 1}}, {}, "user needs a number of ids"),
        ({"label": "y", "history": ["user"]}, {}, "must name two columns"),
        ({"label": "y", "dense": ["city"]}, {}, "column city holds"),
        (SCHEMA, {"y": [0, 1, 2, 0, 0]}, "row 3: y is 2, want 0 or 1"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, schema: Any, change: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, schema, **change)
    with pytest.raises(DataError, match=message):
        list(open_source(f"parquet:{path}").batches(10))


def test_what_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "t.schema.json").write_text("{")
    with pytest.raises(DataError, match="is no JSON"):
        open_source(f"parquet:{path}")
    (tmp_path / "t.schema.json").unlink()
    with pytest.raises(DataError, match=r"t\.schema\.json is missing"):
        open_source(f"parquet:{path}")
    write(tmp_path)
    path.write_bytes(b"PAR1 not")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        open_source(f"parquet:{path}")
