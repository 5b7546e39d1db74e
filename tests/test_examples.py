"""The example programs run as a user would run them, on a few batches."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="no examples beside the tests")
#: Quick to start; what Inductor does with such models is tested elsewhere.
QUICK = ["--data", "synthetic:rows=4096,fields=6,dense=5", "--batch", "128", "--inner", "aot_eager"]


def run(name: str, *arguments: str, extra: str = "") -> str:
    path = os.pathsep.join(p for p in (extra, os.environ.get("PYTHONPATH", "")) if p)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        # Not the source tree, which would stand before the installed package.
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def plan(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "plan.json").read_text())


def fp8_directions(folder: Path) -> int:
    sites = plan(folder)["sites"]
    return sum(d["kernel"] != "high_precision" for s in sites for d in s["directions"].values())


def test_wukong_trains_stops_and_goes_on(tmp_path: Path) -> None:
    where = ["--out", str(tmp_path / "run")]
    run("train_wukong.py", *QUICK, *where, "--rows", "1280")
    assert fp8_directions(tmp_path / "run") > 5
    before = plan(tmp_path / "run")
    said = run("train_wukong.py", *QUICK, *where, "--rows", "1664", "--resume")
    assert "1,664 rows used" in said
    assert plan(tmp_path / "run")["sites"] == before["sites"]
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["row"] == 1664


def _torchrec() -> str:
    """The folder to put on the path for TorchRec; "" when it is installed; skips without it."""
    if importlib.util.find_spec("torchrec") is not None:
        return ""
    folder = os.environ.get("LOKA_TORCHREC", "")
    if not (folder and (Path(folder) / "torchrec").is_dir()):
        pytest.skip("TorchRec is not there; `make torchrec` installs it beside the environment")
    return folder


def test_torchrec_trains_in_fp8(tmp_path: Path) -> None:
    folder = _torchrec()
    probe = [sys.executable, "-c", "import torchrec"]
    path = os.pathsep.join(p for p in (folder, os.environ.get("PYTHONPATH", "")) if p)
    tried = subprocess.run(
        probe, env={**os.environ, "PYTHONPATH": path}, cwd=EXAMPLES, capture_output=True, text=True
    )
    if tried.returncode:
        pytest.skip(f"TorchRec does not import on this torch: {tried.stderr.splitlines()[-1]}")
    out = tmp_path / "run"
    said = run("train_torchrec.py", *QUICK, "--out", str(out), "--rows", "1280", extra=folder)
    assert "GEMMs in FP8" in said
    found = plan(out)
    names = {site["name"] for site in found["sites"]}
    # TorchRec's perceptrons, each fused with its SwishLayerNorm; the table's parameters are left.
    assert {"dense_arch._mlp.1._linear", "over_arch._mlp.1._linear"} <= names
    fused = [site["fused"] or "" for site in found["sites"]]
    # The first has five inputs, which no FP8 kernel takes.
    assert sum("gate" in one for one in fused) == 3
    assert fp8_directions(out) > 5
