"""Turns on a device, over real processes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from loka_compile.lowering import turn as turns

CPU = torch.device("cpu")
#: Takes a turn, says so, and keeps it until it is told to end.
HOLDER = """
import sys, torch
from loka_compile.lowering.turn import turn
with turn(torch.device("cpu")):
    print("mine", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("LOKA_CACHE", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "mine\n"
    yield process
    process.kill()
    process.communicate()


def held(path) -> bool:
    import filelock

    lock = filelock.FileLock(next(path.glob("turn-*.lock")))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return True
    lock.release()
    return False


def test_one_at_a_time(holder, tmp_path) -> None:
    assert held(tmp_path)
    holder.communicate("\n")
    assert not held(tmp_path)
    with turns.turn(CPU):
        assert held(tmp_path)
    assert not held(tmp_path)


def test_who_waits_too_long_goes_on(holder, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LONGEST_WAIT", 0.05)
    with turns.turn(CPU):
        assert held(tmp_path)  # by the other process still
    assert held(tmp_path)


def test_what_ends_by_an_error_gives_the_turn_back(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LOKA_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="mine"), turns.turn(CPU):
        raise ValueError("mine")
    assert not held(tmp_path)


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch) -> None:
    place = tmp_path / "file"
    place.write_text("")
    monkeypatch.setenv("LOKA_CACHE", str(place))
    with turns.turn(CPU):
        pass
