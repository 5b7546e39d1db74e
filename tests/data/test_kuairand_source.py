"""The KuaiRand reader, on small files of the same form and on the real ones (LOKA_DATA)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from loka_compile.data import DataError
from loka_compile.data import base
from loka_compile.data import open_source
from loka_compile.data.kuairand import LABELS
from loka_compile.data.kuairand import LOG
from loka_compile.data.kuairand import USERS
from loka_compile.data.kuairand import VIDEOS
from loka_compile.data.kuairand import KuaiRand


def log(n: int) -> dict[str, list[int | None]]:
    return {
        "time_ms": [1000 + i for i in range(n)],
        "user_id": [i % 3 for i in range(n)],
        "video_id": [i % 4 for i in range(n)],
        "tab": [i % 2 for i in range(n)],
        "hour": [i % 24 for i in range(n)],
        "duration_ms": [100 * i for i in range(n)],
        "play_time_ms": [7 * i for i in range(n)],
        **{name: [(i // (k + 1)) % 2 for i in range(n)] for k, name in enumerate(LABELS)},
    }


def write(folder: Path, rows: dict[str, list[int | None]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    ranges = pa.array(["b", "a", None]).dictionary_encode()
    users = {"user_id": [0, 1, 2], "user_active_degree": ranges}
    users |= {f: [0, 1, 1] for f in ("is_lowactive_period", "is_live_streamer", "is_video_author")}
    for count in ("follow_user_num", "fans_user_num", "friend_user_num", "register_days"):
        users |= {count: [0, 10, 1000], f"{count}_range": ranges}
    users |= {f"onehot_feat{i}": pa.array([0.0, 1.0, None], pa.float32()) for i in range(18)}
    videos = {
        "video_id": [0, 1, 2],  # video 3 is missing: a left join keeps its rows
        "author_id": [900, 5, 900],
        "music_id": pa.array([7, None, 8], pa.int64()),
        "tag": pa.array(["12,3", "12", "9"]).dictionary_encode(),
        "video_type": ["NORMAL", "AD", "NORMAL"],
        "upload_type": ["x", "y", "x"],
        "music_type": pa.array([4.0, None, 9.0], pa.float32()),
        "upload_dt": ["d"] * 3,
        "show_cnt": [1.0, 10.0, 1e6],
        "like_cnt": pa.array([None, 2.0, 3.0], pa.float64()),
    }
    for name, table in ((LOG, rows), (USERS, users), (VIDEOS, videos)):
        pq.write_table(pa.table(table), folder / name)
    return folder


def ids(source: KuaiRand, name: str) -> list[int]:
    index = [f.name for f in source.schema.categorical].index(name)
    return torch.cat([b.categorical[:, index] for b in source.batches(4)]).tolist()


def test_users_and_videos_are_joined_and_unknown_ones_kept(tmp_path: Path) -> None:
    source = KuaiRand(write(tmp_path, log(8)))
    assert source.rows == 8
    assert ids(source, "user_id") == [1, 2, 3, 1, 2, 3, 1, 2]
    assert ids(source, "video_id") == [1, 2, 3, 0, 1, 2, 3, 0]
    assert ids(source, "author_id") == [2, 1, 2, 0, 2, 1, 2, 0]
    assert ids(source, "music_id")[:4] == [1, 0, 2, 0]
    assert ids(source, "first_tag")[:4] == [1, 1, 2, 0]
    assert ids(source, "user_active_degree")[:3] == [2, 1, 0]
    assert ids(source, "hour")[:3] == [1, 2, 3]
    assert source.schema.dense[-2:] == ("show_cnt", "like_cnt")


def test_dense_is_log1p_standardised_over_the_first_rows(tmp_path: Path) -> None:
    source = KuaiRand(write(tmp_path, log(8)))
    dense = torch.cat([b.dense for b in source.batches(8)])[:, 0].numpy()
    raw = np.log1p(100.0 * np.arange(8))
    np.testing.assert_allclose(dense, (raw - raw.mean()) / raw.std(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("label", LABELS)
def test_no_other_label_and_no_play_time_is_a_feature(tmp_path: Path, label: str) -> None:
    rows = log(8)
    told = rows | {c: [1 - v for v in rows[c]] for c in LABELS if c != label}
    told["play_time_ms"] = [123456] * 8
    a = next(iter(KuaiRand(write(tmp_path / "a", rows), label).batches(8)))
    b = next(iter(KuaiRand(write(tmp_path / "b", told), label).batches(8)))
    assert torch.equal(a.categorical, b.categorical)
    assert torch.equal(a.dense, b.dense)
    assert a.label.tolist() == b.label.tolist() == rows[label]
    names = {*(f.name for f in KuaiRand(tmp_path / "a").schema.categorical)}
    assert not names & {*LABELS, "play_time_ms"}


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("is_click", 2, "is_click is 2, want 0 or 1"),
        ("is_click", None, "is_click is missing, want 0 or 1"),
        ("user_id", -7, "user_id is -7"),
        ("video_id", None, "video_id is missing"),
        ("time_ms", 5, "time_ms is 5, want rows in time order"),
    ],
)
def test_a_malformed_row_is_named_or_skipped_and_counted(
    tmp_path: Path, column: str, value: int | None, message: str
) -> None:
    rows = log(8)
    rows[column][5] = value
    write(tmp_path, rows)
    with pytest.raises(DataError) as error:
        list(KuaiRand(tmp_path).batches(4))
    assert f"{LOG}, row 6: {message}" in str(error.value)
    source = KuaiRand(tmp_path, on_bad_row="skip")
    assert sum(len(b) for b in source.batches(4)) == 7
    assert (source.counts.read, source.counts.bad) == (8, 1)
    assert message in source.counts.summary()


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a directory"):
        open_source(f"kuairand:{tmp_path / 'nowhere'}")
    with pytest.raises(DataError, match="needs the directory"):
        open_source("kuairand")
    write(tmp_path, log(4))
    with pytest.raises(DataError, match="did you mean 'is_like'"):
        open_source(f"kuairand:{tmp_path}", label="is_lik")
    (tmp_path / USERS).write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=f"{USERS}: is not a readable Parquet file"):
        KuaiRand(tmp_path)
    (tmp_path / USERS).unlink()
    with pytest.raises(DataError, match=f"{USERS} is missing"):
        KuaiRand(tmp_path)
    pq.write_table(pa.table({"a": [1]}), tmp_path / LOG)
    with pytest.raises(DataError, match=f"{LOG}: no column time_ms"):
        KuaiRand(tmp_path)


def test_the_log_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "STATS_ROWS", 100)
    source = KuaiRand(write(tmp_path, log(30_000)))
    next(iter(source.batches(64)))
    assert source.counts.read == 8_192


@pytest.mark.skipif("LOKA_DATA" not in os.environ, reason="needs LOKA_DATA=DIR with KuaiRand")
def test_the_published_data() -> None:
    source = KuaiRand(os.environ["LOKA_DATA"])
    assert (len(source.schema.categorical), len(source.schema.dense)) == (36, 55)
    batches = list(source.batches(4096))
    label = torch.cat([b.label for b in batches])
    assert len(label) == source.rows == 222_866
    assert label.mean().item() == pytest.approx(0.449, abs=1e-3)
    largest = torch.stack([b.categorical.amax(0) for b in batches]).amax(0)
    assert (largest < torch.tensor(source.schema.cardinalities)).all()
    assert all(b.dense.isfinite().all() and b.dense.abs().max() <= 5.0 for b in batches)
