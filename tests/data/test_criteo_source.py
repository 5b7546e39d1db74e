"""The Criteo layout: plain and gzip, gaps, faulty lines, streaming."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from loka_compile.data import DataError
from loka_compile.data import criteo
from loka_compile.data import open_source


def line(i: int, label: str | None = None, integer: str = "", category: str = "") -> str:
    label = str(i % 2) if label is None else label
    integers = [integer, *(str(i * k) for k in range(1, 13))]
    categories = [category or f"{i % 7:08x}", *(f"{(i * k) % 1000:08x}" for k in range(1, 26))]
    return "\t".join([label, *integers, *categories])


def write(path: Path, lines: list[str]) -> Path:
    text = "".join(f"{x}\n" for x in lines)
    if path.suffix == ".gz":
        with gzip.open(path, "wt") as stream:
            stream.write(text)
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["train.txt", "day_0.gz"])
def test_values_arrive(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo, "BLOCK_BYTES", 4096)  # many blocks
    path = write(tmp_path / name, [line(i, integer="-2" if i % 3 else "") for i in range(300)])
    source = open_source(f"criteo:{path}", dense="raw")
    batches = list(source.batches(64))
    ids, dense, label = (
        np.concatenate([getattr(b, n).numpy() for b in batches])
        for n in ("categorical", "dense", "label")
    )
    assert label.tolist() == [i % 2 for i in range(300)]
    # A gap and a negative count are both 0.
    assert (dense[:, 0] == 0).all()
    np.testing.assert_array_equal(dense[:, 3], [3 * i for i in range(300)])
    np.testing.assert_array_equal(ids[:, 0], [i % 7 + 1 for i in range(300)])
    assert ids.shape == (300, 26) and ids.max() < criteo.BUCKETS
    assert source.counts.read == source.counts.emitted == 300


def test_a_gap_is_id_zero_and_a_hash_is_bounded(tmp_path: Path) -> None:
    gap = line(1).rsplit("\t", 1)[0] + "\t"
    path = write(tmp_path / "t.txt", [gap, line(2, category="ffffffff")])
    batch = next(open_source(f"criteo:{path}", dense="log").batches(2))
    assert batch.categorical[0, 25] == 0
    assert batch.categorical[1, 0] == 0xFFFFFFFF % (criteo.BUCKETS - 1) + 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (line(3, label="2"), r"line 3: label is 2, want 0 or 1"),
        (line(3, label=""), r"line 3: label is None, want 0 or 1"),
        (line(3, integer="many"), r"line 3: I1 is many, want a number"),
        (line(3, category="xyz"), r"line 3: C1 is xyz, want a hexadecimal number"),
        ("1\t2\t3", r"line 3: 3 fields, expected 40"),
    ],
)
def test_a_faulty_line_is_named_or_counted(tmp_path: Path, bad: str, message: str) -> None:
    path = write(tmp_path / "t.txt", [line(1), line(2), bad, line(4)])
    with pytest.raises(DataError, match=message):
        list(open_source(f"criteo:{path}").batches(2))
    source = open_source(f"criteo:{path}", on_bad_row="skip")
    labels = np.concatenate([b.label.numpy() for b in source.batches(2)])
    assert labels.tolist() == [1.0, 0.0, 0.0]
    assert (source.counts.read, source.counts.bad, source.counts.emitted) == (4, 1, 3)


def test_the_file_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo, "BLOCK_BYTES", 4096)
    path = write(tmp_path / "t.txt", [line(i) for i in range(2000)])
    source = open_source(f"criteo:{path}", dense="raw")
    next(iter(source.batches(16)))
    assert source.counts.read < 200


def test_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        open_source(f"criteo:{tmp_path / 'absent'}")
    with pytest.raises(DataError, match="criteo:FILE"):
        open_source("criteo")
    (tmp_path / "day_1.gz").write_bytes(b"\x1f\x8b damaged")
    with pytest.raises(DataError, match="cannot be read"):
        list(open_source(f"criteo:{tmp_path / 'day_1.gz'}").batches(2))
