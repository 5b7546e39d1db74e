"""Probe state on disk: exact round trip, rows only on request, no damage by damage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from loka_compile.errors import ProbeFileError
from loka_compile.probe import sketch as sk
from loka_compile.probe import store
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.statistics import update

CPU = torch.device("cpu")


def observed(features: int, batches: int = 5, gradient: bool = False) -> Statistics:
    held = Statistics.empty(features, torch.bfloat16, CPU, gradient=gradient)
    for _ in range(batches):
        update(torch.randn(20, features).bfloat16(), held)
    if held.coherence is not None:
        held.coherence[:batches] = torch.rand(batches, features)
        rows, amax = torch.randn(20, features), torch.ones(2)
        sk.record_ref(
            rows, rows, torch.zeros((), dtype=torch.float64), held.sketch, held.marks, amax
        )
    return held


@pytest.fixture
def state() -> dict[tuple[str, str], Statistics]:
    return {
        ("mlp.0", "x"): observed(32),
        ("mlp.0", "g"): observed(48, gradient=True),
        ("p#1", "x"): observed(7),
    }


def test_round_trip_with_rows_is_exact_and_goes_on(state, tmp_path: Path) -> None:
    path = store.save(state, tmp_path / "probe.safetensors", rows=True)
    back = store.load(path)
    assert back.keys() == state.keys()
    more = torch.randn(20, 32).bfloat16()
    for key, held in state.items():
        for a, b in zip(held.tensors, back[key].tensors, strict=True):
            assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))
    for held in (state[("mlp.0", "x")], back[("mlp.0", "x")]):
        update(more, held)
    for a, b in zip(state[("mlp.0", "x")].tensors, back[("mlp.0", "x")].tensors, strict=True):
        assert torch.equal(a, b)


def test_rows_reach_the_disk_only_on_request(state, tmp_path: Path) -> None:
    path = store.save(state, tmp_path / "probe.safetensors")
    with safe_open(str(path), framework="pt") as file:
        data = ("|rows", "|sketch", "|marks")
        assert not any(name.endswith(data) for name in file.keys())  # noqa: SIM118
    back = store.load(path)[("mlp.0", "x")]
    assert back.reservoir().shape[0] == 0
    gradient = store.load(path)[("mlp.0", "g")]
    assert not list(sk.sketches(gradient.sketch, gradient.marks))
    assert torch.equal(gradient.coherence[:5], state[("mlp.0", "g")].coherence[:5])
    assert torch.equal(back.mean(), state[("mlp.0", "x")].mean())
    assert torch.equal(back.batch_maxima(), state[("mlp.0", "x")].batch_maxima())


def test_header_reads_without_loka(state, tmp_path: Path) -> None:
    path = store.save(state, tmp_path / "probe.safetensors")
    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata()
    rows = json.loads(metadata["observed"])
    assert [r["site"] for r in rows] == ["mlp.0", "mlp.0", "p#1"]
    assert rows[0]["summary"]["batches"] == 5


@pytest.mark.parametrize("what", ["missing", "garbage", "truncated", "foreign", "newer"])
def test_a_bad_file_is_named_and_never_overwritten(what: str, state, tmp_path: Path) -> None:
    path = tmp_path / "probe.safetensors"
    if what == "garbage":
        path.write_bytes(b"not safetensors at all" * 9)
    elif what == "truncated":
        store.save(state, path)
        path.write_bytes(path.read_bytes()[:-40])
    elif what == "foreign":
        save_file({"w": torch.ones(2)}, str(path))
    elif what == "newer":
        save_file({"w": torch.ones(2)}, str(path), metadata={"kind": store.KIND, "version": "99"})
    with pytest.raises(ProbeFileError, match=r"probe\.safetensors"):
        store.load(path)
    if what != "missing":
        before = path.read_bytes()
        with pytest.raises(ProbeFileError):
            store.save(state, path)
        assert path.read_bytes() == before
    assert not list(tmp_path.glob(".probe*"))


KILLED = r"""
import sys, torch
from loka_compile.probe import store
from loka_compile.probe import sketch as sk
from loka_compile.probe.statistics import Statistics
held = Statistics.empty(4096, torch.float32, torch.device("cpu"))
n = 0
while True:
    n += 1
    held.scalars[0] = n
    held.moments.fill_(n)
    store.save({("a", "x"): held}, sys.argv[1], rows=True)
    print(n, flush=True)
"""


def test_kill_in_the_middle_of_a_save_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "probe.safetensors"
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    for _ in range(3):
        assert writer.stdout.readline()
    time.sleep(0.05)
    os.kill(writer.pid, signal.SIGKILL)
    rest = writer.stdout.read().split()
    writer.wait()
    done = int(rest[-1]) if rest else 3
    back = store.load(path)[("a", "x")]
    assert back.batches in (done, done + 1)
    assert (back.moments == back.batches).all()


def test_size_is_bounded_and_known() -> None:
    held = [Statistics.empty(c, torch.bfloat16, CPU, gradient=c == 32) for c in (96, 32)]
    real = sum(t.numel() * t.element_size() for s in held for t in s.tensors)
    assert store.bytes_per_site(96, 32) == real
    # K = 123,200: the reservoir is 63 MB, and nothing is K x K.
    assert store.bytes_per_site(123_200, 1024) < 80e6
