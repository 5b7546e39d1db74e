"""Flight rows -> ids and dense values known before departure, joined with planes and weather."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import numpy as np
import pyarrow as pa

from loka_compile.data.base import CategoricalField
from loka_compile.data.base import Chunk
from loka_compile.data.base import DataError
from loka_compile.data.csv_stream import numbers
from loka_compile.data.csv_stream import read_blocks
from loka_compile.data.encode import MISSING
from loka_compile.data.encode import Vocabulary

#: Ids met in the stream, in order of first sight; bounds leave room over the 2013 file.
_STREAMED = {
    "tailnum": 5120,
    "flight": 5120,
    "dest": 128,
    "carrier": 32,
    "origin": 8,
    "route": 512,
    "carrier_dest": 512,
    "manufacturer": 64,
    "model": 256,
    "plane_type": 8,
    "engine": 16,
}
#: Small whole numbers, used as they are (plus one: 0 stays "missing"). No month, day or day of the
#: year: a time-ordered pass meets each value once, so a model can only overfit to them.
_BOUNDED = {"weekday": 8, "hour": 26, "minute": 61, "wind_sector": 17, "arrival_hour": 26}

FIELDS = tuple(CategoricalField(n, c) for n, c in (*_STREAMED.items(), *_BOUNDED.items()))

_WEATHER = (
    "temp",
    "dewp",
    "humid",
    "wind_dir",
    "wind_speed",
    "wind_gust",
    "precip",
    "pressure",
    "visib",
)
DENSE = (
    "log_distance",
    "departure_minute",
    "arrival_minute",
    "planned_minutes",
    "plane_age",
    "seats",
    "temp",
    "dewp",
    "humid",
    "wind_sin",
    "wind_cos",
    "wind_speed",
    "wind_gust",
    "precip",
    "pressure",
    "visib",
)
_PLANE_TEXT = ("manufacturer", "model", "type", "engine")


class FlightEncoder:
    """Holds the two small side tables and the vocabularies met so far."""

    def __init__(self, planes: Path, weather: Path) -> None:
        self._plane_rows, self._plane_text, self._plane_numbers = _planes(planes)
        self._hours, self._weather = _weather(weather)
        self._vocabularies = {name: Vocabulary(size) for name, size in _STREAMED.items()}

    @property
    def overflow(self) -> int:
        return sum(v.overflow for v in self._vocabularies.values())

    def encode(self, rows: pa.Table) -> Chunk:
        """Typed flight rows (time-ordered) -> ids int64 ``[n, 16]``, dense float32 ``[n, 16]``."""
        text = {
            c: rows[c].to_pylist()
            for c in ("tailnum", "flight", "dest", "carrier", "origin", "time_hour")
        }
        whole = {
            c: rows[c].to_numpy()
            for c in ("year", "month", "day", "hour", "minute", "sched_arr_time", "distance")
        }
        plane = np.array([self._plane_rows.get(t, 0) for t in text["tailnum"]])
        hours = zip(text["origin"], text["time_hour"], strict=True)
        weather = self._weather[[self._hours.get(key, 0) for key in hours]]
        days = _days(whole["year"], whole["month"], whole["day"])
        ids = self._ids(text, whole, plane, weather, days)
        dense = self._dense(whole, plane, weather)
        return Chunk(ids, dense, rows["label"].to_numpy())

    def _ids(
        self,
        text: dict[str, list[str]],
        whole: dict[str, np.ndarray],
        plane: np.ndarray,
        weather: np.ndarray,
        days: np.ndarray,
    ) -> np.ndarray:
        text = dict(text)
        text["route"] = [f"{o}-{d}" for o, d in zip(text["origin"], text["dest"], strict=True)]
        text["carrier_dest"] = [
            f"{c}-{d}" for c, d in zip(text["carrier"], text["dest"], strict=True)
        ]
        for column in _PLANE_TEXT:
            name = "plane_type" if column == "type" else column
            text[name] = [self._plane_text[column][p] for p in plane]
        columns = [self._vocabularies[name].encode(text[name]) for name in _STREAMED]
        sector = np.nan_to_num(weather[:, _WEATHER.index("wind_dir")] // 22.5 % 16 + 1, nan=0.0)
        # 1970-01-01 was a Thursday; +3 makes Monday 0.
        weekday = (days.astype(np.int64) + 3) % 7 + 1
        columns += [
            weekday,
            whole["hour"] + 1,
            whole["minute"] + 1,
            sector,
            whole["sched_arr_time"] // 100 + 1,
        ]
        return np.stack([np.asarray(c, dtype=np.int64) for c in columns], axis=1)

    def _dense(
        self,
        whole: dict[str, np.ndarray],
        plane: np.ndarray,
        weather: np.ndarray,
    ) -> np.ndarray:
        built, seats = self._plane_numbers[plane].T
        sky = dict(zip(_WEATHER, weather.T, strict=True))
        wind = np.deg2rad(sky["wind_dir"])
        departure = whole["hour"] * 60 + whole["minute"]
        arrival = whole["sched_arr_time"] // 100 * 60 + whole["sched_arr_time"] % 100
        columns = {
            "log_distance": np.log(whole["distance"]),
            "departure_minute": departure,
            "arrival_minute": arrival,
            # In local clock times: the time zone is the destination's, which the ids tell.
            "planned_minutes": (arrival - departure) % 1440,
            "plane_age": whole["year"] - built,
            "seats": seats,
            "wind_sin": np.sin(wind),
            "wind_cos": np.cos(wind),
            **{c: sky[c] for c in _WEATHER if c != "wind_dir"},
        }
        return np.stack([np.asarray(columns[c], dtype=np.float32) for c in DENSE], axis=1)


def _days(year: np.ndarray, month: np.ndarray, day: np.ndarray) -> np.ndarray:
    """Calendar day as datetime64[D] ``[n]``."""
    months = (year.astype(np.int64) - 1970) * 12 + month - 1
    return months.astype("datetime64[M]").astype("datetime64[D]") + (day.astype(np.int64) - 1)


def _refuse(message: str) -> NoReturn:
    # A broken side table would spoil many rows at once, so it is never skipped over.
    raise DataError(message)


def _planes(path: Path) -> tuple[dict[str, int], dict[str, list[str]], np.ndarray]:
    """tail number -> row; text columns; (year built, seats) ``[rows, 2]``; row 0 = unknown."""
    rows: dict[str, int] = {}
    text: dict[str, list[str]] = {c: [""] for c in _PLANE_TEXT}
    values = [np.full((1, 2), np.nan)]
    for block in read_blocks(path, ("tailnum", "year", "seats", *_PLANE_TEXT), _refuse):
        for tail in block.columns["tailnum"]:
            rows[tail] = len(rows) + 1
        for c in _PLANE_TEXT:
            text[c] += block.columns[c]
        values.append(_floats(block.columns, ("year", "seats"), block.lines, path))
    return rows, text, np.concatenate(values)


def _weather(path: Path) -> tuple[dict[tuple[str, str], int], np.ndarray]:
    """(origin, hour) -> row; weather float ``[rows, 9]``; row 0 = unknown."""
    rows: dict[tuple[str, str], int] = {}
    values = [np.full((1, len(_WEATHER)), np.nan)]
    for block in read_blocks(path, ("origin", "time_hour", *_WEATHER), _refuse):
        for key in zip(block.columns["origin"], block.columns["time_hour"], strict=True):
            rows[key] = len(rows) + 1
        values.append(_floats(block.columns, _WEATHER, block.lines, path))
    return rows, np.concatenate(values)


def _floats(
    columns: dict[str, list[str]], names: tuple[str, ...], lines: list[int], path: Path
) -> np.ndarray:
    out = []
    for name in names:
        value, wrong = numbers(columns[name])
        wrong &= np.array([v not in MISSING for v in columns[name]])
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            _refuse(f"{path}, line {lines[i]}: {name} is {columns[name][i]!r}, want a number or NA")
        out.append(value)
    return np.stack(out, axis=1)
