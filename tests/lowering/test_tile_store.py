"""Which tile a shape gets: measured rows before the rule, and never one that cannot run."""

from __future__ import annotations

import itertools
import logging
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loka_compile import _compat
from loka_compile.kernels import tiles
from loka_compile.kernels.tiles import Config
from loka_compile.lowering import tile_store
from loka_compile.lowering.tile_store import Tile
from loka_compile.lowering.tile_store import TileKey
from loka_compile.lowering.tune import FORMS
from loka_compile.lowering.tune import block_in

DEVICE = torch.device("cpu")
SHAPE = (1000, 512, 7680, 256)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOKA_CACHE", str(tmp_path))
    tile_store._table.cache_clear()
    yield
    tile_store._table.cache_clear()


TUNED = Config(128, 128, 2, 8, 3)


def row(m: int = 1000, config: Config = TUNED, form: str = "y") -> Tile:
    return Tile(TileKey.of(m, *SHAPE[1:], form, DEVICE), config, 9.5, "2026-11-30")


def find(m: int = 1000, form: str = "y") -> Config | None:
    return tile_store.find(m, *SHAPE[1:], form, DEVICE)


def test_a_tuned_tile_is_found_again() -> None:
    assert find() is None
    tile_store.put([row()])
    tile_store.put([row(config=Config(64, 128, 4, 4, 3))])
    assert find() == Config(64, 128, 4, 4, 3)
    assert tile_store.user_rows() == [row(config=Config(64, 128, 4, 4, 3))]
    # Any M of the bucket; else the nearest within an octave; never another form.
    assert find(1024) == find(1500) == find(600) == find()
    assert find(4096) is None and find(form="y8") is None


def test_another_compiler_or_device_needs_its_own() -> None:
    other = row()
    tile_store.put([replace(other, key=replace(other.key, triton="9.9"))])
    tile_store.put([replace(other, key=replace(other.key, device="B200"))])
    assert find() is None


@pytest.mark.parametrize("what", ["garbage", "foreign", "newer"])
def test_a_file_that_cannot_be_read_costs_a_warning(what: str, caplog) -> None:
    file = tile_store.path()
    if what == "garbage":
        file.write_bytes(b"garbage" * 100)
    else:
        with sqlite3.connect(file) as connection:
            connection.execute("CREATE TABLE other (x)")
            if what == "newer":
                connection.execute(f"PRAGMA application_id = {tile_store.APPLICATION}")
                connection.execute("PRAGMA user_version = 99")
    before = file.read_bytes()
    with caplog.at_level(logging.WARNING, "loka_compile"):
        assert find() is None and find() is None
    assert len(caplog.records) == 1 and "tiles.sqlite" in caplog.text
    with pytest.raises(sqlite3.Error):
        tile_store.put([row()])
    assert file.read_bytes() == before


def test_json_keeps_rows(tmp_path: Path) -> None:
    rows = [row(), row(form="y8")]
    tile_store.write_json(rows, tmp_path / "tiles.json")
    assert sorted(tile_store.read_json(tmp_path / "tiles.json"), key=str) == sorted(rows, key=str)
    (tmp_path / "other.json").write_text('{"kind": "loka-costs", "version": 1, "rows": []}')
    with pytest.raises(ValueError, match="not a table of tiles"):
        tile_store.read_json(tmp_path / "other.json")


def test_a_split_is_resident_at_every_m_of_its_bucket() -> None:
    for m in (897, 1024):
        config = tiles.resident(Config(64, 128, 8, 4, 3), m, 512, 256, 132)
        assert -(-m // 64) * 2 * config.split_k <= 132
    assert tiles.resident(Config(64, 128, 8, 4, 3), 64, 256, 256, 132).split_k == 8


@pytest.mark.parametrize("m", [1, 16, 64, 65, 1000, 1024, 6144, 16384, 100_000])
def test_buckets_cover_and_are_their_own(m: int) -> None:
    at = tile_store.bucket(m)
    assert m <= at <= max(64, m * 1.25) and tile_store.bucket(at) == at


def test_shipped_tiles_can_run() -> None:
    rows = tile_store.shipped_rows()
    assert rows and len({r.key for r in rows}) == len(rows)
    for r in rows:
        assert r.key.m == tile_store.bucket(r.key.m) and r.key.block == block_in(
            r.key.form, r.key.n
        )
        fits = tiles.resident(r.config, r.key.m, r.key.n, r.key.block, 132)
        assert fits == r.config and r.config.block_m % r.config.split_k == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 256, 7680), (1024, 2048, 4096), (16384, 8256, 512)])
def test_the_rule_keeps_the_epilogue_in_registers(form: str, m: int, n: int, k: int) -> None:
    """128 FP32 values of the accumulator a thread at most, 64 where the epilogue holds more."""
    config = tiles.default_config(m, n, k, block := block_in(form, n), form=form)
    held = config.block_m * block / (32 * config.warps)
    assert held <= (64 if {"m", "p"} & {*form.split("+")} else 128)
    if "t" in form.split("+") and config.block_m == 64:
        assert held <= 64
    assert set(form.split("+")) <= {"y", "y8", "u", "t", "m", "p"}


def test_a_launch_takes_the_measured_tile(monkeypatch) -> None:
    """Also one that was measured after the shape was first seen; its split fits the very M."""
    monkeypatch.setattr(tiles, "programs_of", lambda device: 132)
    monkeypatch.setattr(_compat, "device_key", lambda device: "some GPU")
    cuda = torch.device("cuda", 0)
    tiles.config_for.cache_clear()
    try:
        rule = tiles.config_for(*SHAPE, "y", cuda)
        assert rule == tiles.default_config(*SHAPE)
        key = TileKey.of(*SHAPE, "y", cuda)
        held = {"a launch's recipe": rule}
        monkeypatch.setattr(tiles, "HOLDERS", [held])
        tile_store.put([Tile(key, Config(128, 64, 8, 4, 2), 1.0, "2026-11-30")])
        assert not held
        assert tiles.config_for(*SHAPE, "y", cuda) == Config(128, 64, 8, 4, 2)
        other = tiles.default_config(1024, *SHAPE[1:], form="y8")
        assert tiles.config_for(1024, *SHAPE[1:], "y8", cuda) == other
    finally:
        tiles.config_for.cache_clear()


def test_a_form_says_what_a_launch_moves() -> None:
    assert tiles.form_of(False, False, False, False, True) == "y"
    assert tiles.form_of(True, True, True, False, True) == "y8+u+t"
    assert tiles.form_of(False, True, False, True, False) == "y+u+m+p"
    assert {tiles.form_of(*f) for f in itertools.product((False, True), repeat=5)} >= {*FORMS}


def test_without_a_measured_row_the_rule_decides() -> None:
    got = tiles.config_for(64, 64, 64, 64, "y", DEVICE)
    assert got == tiles.default_config(64, 64, 64, 64, tiles.programs_of(DEVICE))
