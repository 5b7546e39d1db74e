"""``kuairand:DIR``: will a user click the video shown? (KuaiRand-Pure, 14 days, CC BY-SA 4.0)

The log is streamed; the user and video tables are small and held in memory as joined arrays.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from loka_compile.data.base import CategoricalField
from loka_compile.data.base import Chunk
from loka_compile.data.base import DataError
from loka_compile.data.base import HistoryField
from loka_compile.data.base import OnBadRow
from loka_compile.data.base import Schema
from loka_compile.data.base import Source
from loka_compile.data.encode import DENSE_FORMS
from loka_compile.data.encode import counts
from loka_compile.data.encode import log1p

DEFAULT_LABEL = "is_click"
LABELS = (
    "is_click",
    "long_view",
    "is_like",
    "is_follow",
    "is_comment",
    "is_forward",
    "is_hate",
    "is_profile_enter",
)
CHUNK_ROWS = 8_192
LOG = "kuairand_pure_14d_log.parquet"
HISTORY = "kuairand_pure_history.parquet"
USERS = "kuairand_pure_users.parquet"
VIDEOS = "kuairand_pure_videos.parquet"

#: Context ids of the log itself: value + 1, bounded. Labels and play_time_ms are post-click.
_CONTEXT = {"tab": 16, "hour": 25}
_USER_IDS = (
    "user_active_degree",
    "is_lowactive_period",
    "is_live_streamer",
    "is_video_author",
    "follow_user_num_range",
    "fans_user_num_range",
    "friend_user_num_range",
    "register_days_range",
    *(f"onehot_feat{i}" for i in range(18)),
)
_VIDEO_IDS = ("author_id", "music_id", "first_tag", "video_type", "upload_type", "music_type")
_USER_COUNTS = ("follow_user_num", "fans_user_num", "friend_user_num", "register_days")
_NOT_STATISTICS = frozenset(
    {
        "video_id",
        "author_id",
        "video_type",
        "upload_dt",
        "upload_type",
        "upload_date",
        "visible_status",
        "video_duration",
        "server_width",
        "server_height",
        "music_id",
        "music_type",
        "tag",
        # How many days were summed: a fact about the table, not about the video.
        "counts",
    }
)


@dataclass(frozen=True, eq=False)
class _Side:
    """One joined table, indexed by id + 1; row 0 stands for an id that the table does not hold."""

    row_of: np.ndarray  # int64 [largest id + 2]
    ids: np.ndarray  # int64 [rows + 1, fields]
    dense: np.ndarray  # float32 [rows + 1, columns], NaN where unknown
    cardinalities: tuple[int, ...]

    def rows(self, keys: np.ndarray) -> np.ndarray:
        return self.row_of[np.where((keys >= 0) & (keys < len(self.row_of) - 1), keys + 1, 0)]


class KuaiRand(Source):
    """222,866 impressions of a short-video feed in time order; 36 id fields, 55 dense values.

    Dense: log1p of the duration, the user's four counts and the video's statistics. The latter
    cover the whole period (a mild leak that this data set is known for): compare arms on it, do
    not quote its absolute AUC.
    """

    name = "kuairand"
    history_fields = ("user_id", "video_id")
    dense_forms = DENSE_FORMS

    def __init__(
        self,
        directory: str | Path,
        label: str = DEFAULT_LABEL,
        on_bad_row: OnBadRow = "error",
        dense_form: str = "standard",
    ) -> None:
        super().__init__(on_bad_row, dense_form)
        # Side tables are held as they are used: counts, or their logarithms.
        self._scaled = counts if dense_form == "raw" else log1p
        self._folder = Path(directory)
        self._watched: np.ndarray | None = None
        if label not in LABELS:
            near = difflib.get_close_matches(label, LABELS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise DataError(f"kuairand has no label {label!r}; {hint}Labels: {', '.join(LABELS)}")
        folder = Path(directory)
        if not folder.is_dir():
            raise DataError(f"kuairand: {folder} is not a directory; it must hold {LOG}")
        self._log = _open(folder / LOG)
        self._columns = ["time_ms", "user_id", "video_id", *_CONTEXT, "duration_ms", label]
        _require(self._log, folder / LOG, self._columns)
        self._path = folder / LOG
        users, videos = _open(folder / USERS), _open(folder / VIDEOS)
        statistics = tuple(c for c in videos.schema_arrow.names if c not in _NOT_STATISTICS)
        self._users = _side(users, folder / USERS, "user_id", _USER_IDS, _USER_COUNTS, self._scaled)
        self._videos = _side(
            videos, folder / VIDEOS, "video_id", _VIDEO_IDS, statistics, self._scaled
        )
        self.rows = self._log.metadata.num_rows
        fields = (
            ("user_id", len(self._users.ids)),
            ("video_id", len(self._videos.ids)),
            *zip(_VIDEO_IDS, self._videos.cardinalities, strict=True),
            *_CONTEXT.items(),
            *zip(_USER_IDS, self._users.cardinalities, strict=True),
        )
        self.schema = Schema(
            tuple(CategoricalField(n, c) for n, c in fields),
            ("duration_ms", *_USER_COUNTS, *statistics),
            label,
        )

    def _chunks(self) -> Iterator[Chunk]:
        latest = -1
        label = self.schema.label
        for batch in _batches(self._log, self._path, self._columns):
            first = self.counts.read
            self.counts.read += batch.num_rows
            whole = {
                c: pc.fill_null(batch[c].cast(pa.int64()), -1).to_numpy(zero_copy_only=False)
                for c in self._columns
            }
            keep = self._check(whole, first, latest)
            if not keep.any():
                continue
            whole = {c: v[keep] for c, v in whole.items()}
            latest = int(whole["time_ms"][-1])
            users = self._users.rows(whole["user_id"])
            videos = self._videos.rows(whole["video_id"])
            context = [np.clip(whole[c] + 1, 0, n - 1) for c, n in _CONTEXT.items()]
            ids = np.column_stack(
                [users, videos, self._videos.ids[videos], *context, self._users.ids[users]]
            )
            dense = np.column_stack(
                [
                    self._scaled(whole["duration_ms"]),
                    self._users.dense[users],
                    self._videos.dense[videos],
                ]
            )
            history = None if self._watched is None else self._watched[users]
            yield Chunk(ids, dense, whole[label].astype(np.float32), history)

    def attach_history(self, length: int = 50, key_and_item: tuple[str, str] | None = None) -> None:
        """The recorded history: videos watched before the log begins (at most 50 are there).

        With ``key_and_item``, or without the file that holds it, from the rows of the log instead.
        """
        path = self._folder / HISTORY
        if key_and_item is not None or not path.is_file():
            super().attach_history(length, key_and_item)
            return
        file = _open(path)
        _require(file, path, ["user_id", "watch_seq"])
        watched = np.zeros((len(self._users.ids), length), dtype=np.int64)
        for batch in _batches(file, path, ["user_id", "watch_seq"]):
            rows = self._users.rows(batch["user_id"].cast(pa.int64()).to_numpy())
            for row, seen in zip(rows, batch["watch_seq"].to_pylist(), strict=True):
                if row and seen:
                    items = self._videos.rows(np.array(seen[-length:], dtype=np.int64))
                    watched[row, length - len(items) :] = items
        self._watched = watched
        self.schema = replace(self.schema, history=HistoryField("video_id", length))

    def _check(self, whole: dict[str, np.ndarray], first: int, latest: int) -> np.ndarray:
        """bool ``[n]``: rows to keep. A row number counts from 1, as the file's first row."""
        good = np.ones(len(whole["time_ms"]), dtype=bool)

        def refuse(wrong: np.ndarray, column: str, want: str) -> None:
            for i in np.flatnonzero(wrong & good):
                value = "missing" if whole[column][i] == -1 else whole[column][i]
                row = first + int(i) + 1
                self.bad_row(f"{self._path}, row {row}: {column} is {value}, want {want}")
            good[wrong] = False

        label = self.schema.label
        refuse(~np.isin(whole[label], (0, 1)), label, "0 or 1")
        for column in ("time_ms", "user_id", "video_id", "duration_ms"):
            refuse(whole[column] < 0, column, "a number that is not negative")
        time = np.where(good, whole["time_ms"], -1)
        before = np.maximum.accumulate(np.concatenate([[latest], time[:-1]]))
        refuse(good & (time < before), "time_ms", "rows in time order (sort the file by time_ms)")
        return good


def _open(path: Path) -> pq.ParquetFile:
    if not path.is_file():
        raise DataError(f"kuairand: {path} is missing; the directory must hold that file")
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as e:
        raise DataError(f"{path}: is not a readable Parquet file ({e}); copy it again") from e


def _require(file: pq.ParquetFile, path: Path, columns: Sequence[str]) -> None:
    absent = [c for c in columns if c not in file.schema_arrow.names]
    if absent:
        raise DataError(f"{path}: no column {', '.join(absent)}; is this the KuaiRand-Pure file?")


def _batches(file: pq.ParquetFile, path: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    try:
        yield from file.iter_batches(batch_size=CHUNK_ROWS, columns=list(columns))
    except (pa.ArrowException, OSError) as e:
        raise DataError(f"{path}: damaged Parquet data ({e}); copy the file again") from e


def _side(
    file: pq.ParquetFile,
    path: Path,
    key: str,
    id_fields: Sequence[str],
    dense_fields: Sequence[str],
    scaled: Callable[[np.ndarray], np.ndarray],
) -> _Side:
    """Encode a side table: id fields by their own values (sorted), dense fields by ``scaled``."""
    stored = ["tag" if f == "first_tag" else f for f in id_fields]
    _require(file, path, [key, *stored, *dense_fields])
    table = pa.Table.from_batches(
        list(_batches(file, path, [key, *stored, *dense_fields])), schema=None
    )
    keys = table[key].cast(pa.int64()).to_numpy()
    if len(keys) == 0 or keys.min() < 0 or keys.max() > 100 * len(keys) + 1_000_000:
        raise DataError(f"{path}: {key} is no dense, non-negative index; is this the right file?")
    row_of = np.zeros(int(keys.max()) + 2, dtype=np.int64)
    row_of[keys + 1] = np.arange(1, len(keys) + 1)
    ids = [
        _codes(table[s], first_only=f == "first_tag")
        for f, s in zip(id_fields, stored, strict=True)
    ]
    dense = [
        scaled(pc.fill_null(table[c].cast(pa.float64()), float("nan")).to_numpy())
        for c in dense_fields
    ]
    unknown = np.full((1, len(dense_fields)), np.nan, dtype=np.float32)
    return _Side(
        row_of,
        np.concatenate([np.zeros((1, len(ids)), dtype=np.int64), np.stack(ids, axis=1)]),
        np.concatenate([unknown, np.stack(dense, axis=1)]),
        tuple(int(column.max()) + 1 for column in ids),
    )


def _codes(column: pa.ChunkedArray, first_only: bool) -> np.ndarray:
    """Values -> 1.. in sorted order, null -> 0. ``first_only`` keeps the first of "a,b,c"."""
    values = column.combine_chunks()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if first_only:
        values = pc.list_element(pc.split_pattern(values.cast(pa.string()), ",", max_splits=1), 0)
    ordered = pc.unique(pc.drop_null(values)).sort()
    return pc.fill_null(pc.add(pc.index_in(values, ordered), 1), 0).to_numpy().astype(np.int64)
