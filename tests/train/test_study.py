"""A study with stand-ins for the backend: units on disk, going on, pairing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from loka_compile.data import Schema
from loka_compile.data import Source
from loka_compile.data import registry
from loka_compile.data.base import CategoricalField
from loka_compile.data.base import Chunk
from loka_compile.train import processes
from loka_compile.train import study
from loka_compile.train.loop import TrainError
from loka_compile.train.processes import FirstAlone
from loka_compile.train.processes import shares
from loka_compile.train.study import StudyConfig
from loka_compile.train.study import Unit
from loka_compile.train.study import load_trace
from loka_compile.train.study import run_units

UNITS = [Unit(seed, arm) for seed in (0, 1) for arm in ("original", "bf16_mods", "control")]


class Coins(Source):
    """Label 1 with a probability that the source tells."""

    name = "coins"
    schema = Schema((CategoricalField("a", 8), CategoricalField("b", 4)), ("x",), "y")
    synthetic = True

    def _chunks(self) -> Iterator[Chunk]:
        r = np.random.default_rng(0)
        ids = np.stack([r.integers(8, size=640), r.integers(4, size=640)], axis=1)
        truth = np.where(ids[:, 0] % 2 == 1, 0.9, 0.2).astype(np.float32)
        label = (r.random(640) < truth).astype(np.float32)
        yield Chunk(ids, r.random((640, 1)), label, truth=truth)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is compiled: what is tested stands around it."""
    monkeypatch.setitem(registry._OPENERS, "coins", (lambda *a, **k: Coins(), "coins"))
    monkeypatch.setattr(torch, "compile", lambda module, **k: module)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config(**change: Any) -> StudyConfig:
    return StudyConfig(**{"data": "coins", "batch": 64, "device": "cpu"} | change)


def test_a_stopped_study_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_units(tmp_path, config(), UNITS[:4]) == []
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "units").iterdir()}
    assert len(kept) == 4
    trained = []
    run_arm = study.run_arm
    monkeypatch.setattr(study, "run_arm", lambda a, *r: trained.append(a.name) or run_arm(a, *r))
    assert run_units(tmp_path, config(), UNITS) == []
    assert trained == ["bf16_mods", "control"]
    # By arm, so that compiled code is used again.
    order: list[str] = []
    monkeypatch.setattr(study, "run_arm", lambda a, *r: order.append(a.name) or run_arm(a, *r))
    run_units(tmp_path / "other", config(), UNITS)
    assert order == ["bf16_mods", "control"] * 2 + ["original"] * 2
    assert all(p.stat().st_mtime_ns == then for p, then in kept.items())
    assert run_units(tmp_path, config(), UNITS) == []
    assert len(trained) == 2


def test_a_unit_depends_on_its_seed_alone(tmp_path: Path) -> None:
    run_units(tmp_path / "a", config(), UNITS)
    run_units(tmp_path / "b", config(), UNITS[::-1])
    for unit in UNITS:
        one, other = (load_trace(unit.path(tmp_path / x))[0] for x in "ab")
        np.testing.assert_array_equal(one.logits, other.logits)
    first = [load_trace(Unit(s, "original").path(tmp_path / "a"))[0].logits for s in (0, 1)]
    assert not np.array_equal(*first)


def test_the_control_differs_by_rounding_only(tmp_path: Path) -> None:
    run_units(tmp_path, config(), UNITS)
    mods, control = (load_trace(Unit(0, a).path(tmp_path))[0] for a in ("bf16_mods", "control"))
    assert not np.array_equal(mods.logits, control.logits)
    np.testing.assert_allclose(mods.logits, control.logits, atol=0.05)


def test_another_study_is_not_mixed_in(tmp_path: Path) -> None:
    run_units(tmp_path, config(), UNITS[:1])
    with pytest.raises(TrainError, match="another batch; use --out"):
        run_units(tmp_path, config(batch=32), UNITS)
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(TrainError, match="damaged"):
        run_units(tmp_path, config(), UNITS)


def test_a_fault_leaves_the_other_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = study.build

    def broken(name: str, *rest: Any) -> Any:
        if name == "bf16_mods":
            raise RuntimeError("no room")
        return build(name, *rest)

    monkeypatch.setattr(study, "build", broken)
    faults = run_units(tmp_path, config(), UNITS)
    assert faults == [f"bf16_mods, seed {s}: RuntimeError: no room" for s in (0, 1)]
    assert sorted(p.stem for p in (tmp_path / "units").iterdir()) == [
        "control-0000",
        "control-0001",
        "original-0000",
        "original-0001",
    ]


def test_no_unit_begins_after_the_time_limit(tmp_path: Path) -> None:
    assert run_units(tmp_path, config(), UNITS, time_limit=-1.0) == []
    assert not (tmp_path / "units").exists()


def test_a_damaged_unit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(TrainError, match=r"x\.npz: no unit of a study"):
        load_trace(path)


def test_work_is_cut_by_what_compiling_costs() -> None:
    arms = ("loka", "original", "bf16_mods", "control")
    units = [Unit(s, a) for a in arms for s in range(16)]
    pieces = shares(units, 19)
    assert sorted((u for p in pieces for u in p), key=str) == sorted(units, key=str)
    # Each seed of loka compiles; the rest shares code: one process for one, two for the other.
    assert [len(p) for p in pieces] == [16, 16, 16, *[1] * 16]
    assert {frozenset(u.arm for u in p) for p in pieces[:3]} == {
        frozenset({"original"}),
        frozenset({"bf16_mods", "control"}),
    }
    for piece in pieces[:3]:
        seeds = [u.seed for u in piece]
        assert seeds == sorted(seeds)
    assert [len(p) for p in shares(units[16:], 12)] == [4] * 12
    assert len(shares(units, 2)) == 18


def test_one_process_compiles_first(tmp_path: Path) -> None:
    with FirstAlone(tmp_path, "loka") as one, FirstAlone(tmp_path, "original") as other:
        assert one.first and other.first
    # What has been compiled is waited for by nobody.
    for _ in range(2):
        with FirstAlone(tmp_path, "loka") as again:
            assert not again.first


def test_the_others_wait_until_it_has_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "WAIT_SECONDS", 0.5)

    def waited() -> float:
        begun = time.monotonic()
        with FirstAlone(tmp_path, "loka") as second:
            assert not second.first
        return time.monotonic() - begun

    with FirstAlone(tmp_path, "loka") as turn:
        assert waited() >= 0.5
        turn.release()
        turn.release()
        assert waited() < 0.5


def test_a_first_that_failed_is_replaced(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), FirstAlone(tmp_path, "loka"):
        raise RuntimeError
    with FirstAlone(tmp_path, "loka") as turn:
        assert turn.first


def test_each_step_is_told(tmp_path: Path) -> None:
    steps: list[int] = []
    worker = study.Worker(tmp_path, config())
    assert worker.run(UNITS[:1], None, lambda: steps.append(1)) == []
    assert len(steps) == 10


def test_two_processes_share_the_work(tmp_path: Path) -> None:
    """In processes of their own, so without this module's stand-ins: flights are not needed."""
    own = StudyConfig(data="synthetic:rows=256,seed=3", batch=64, device="cpu", model="dlrm")
    faults = run_units(tmp_path, own, [Unit(0, "broken"), Unit(1, "broken")], jobs=2)
    assert sorted(faults) == [f"broken, seed {s}: KeyError: 'broken'" for s in (0, 1)]


def test_mistakes_are_named() -> None:
    for change, message in (
        ({"arms": ("lokka",)}, "unknown arm 'lokka'; use one of original"),
        ({"model": "dcn"}, "unknown model 'dcn'"),
        ({"scale": "huge"}, "unknown scale 'huge'"),
    ):
        with pytest.raises(TrainError, match=message):
            config(**change)


def test_uniform_fp8_takes_wide_linears_only() -> None:
    from loka_compile.train.arms import wide_linears

    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 128), nn.Linear(128, 1))
    assert wide_linears(model) == ["1"]


def test_the_identity_is_plain_json() -> None:
    assert json.loads(json.dumps(config().identity()))["device"] == "cpu"
