"""Restart: checkpoint + plan in a new process predicts identically; without the plan it says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = r"""
import json, logging, sys
import torch
from torch import nn
import loka_compile

folder, what = sys.argv[1:]
logging.basicConfig(stream=sys.stderr)
options = {"emulate": True, "inner": "aot_eager"}
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 48),
                      nn.LayerNorm(48), nn.SiLU(), nn.Linear(48, 1))
x = torch.randn(64, 32)
if what == "with plan":
    options["plan"] = f"{folder}/plan.json"
compiled = torch.compile(model, backend="loka", options=options)
if what == "train":
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(12):
        with torch.autocast("cpu", torch.bfloat16):
            loss = (compiled(x).float() - x[:, :1]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), f"{folder}/model.pt")
    loka_compile.plan_of(model).save(f"{folder}/plan.json")
else:
    model.load_state_dict(torch.load(f"{folder}/model.pt"))
model.eval()
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    print(json.dumps(compiled(x).float().flatten().tolist()))
"""


def run(folder: Path, what: str) -> tuple[list[float], str]:
    script = folder / "run.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(folder), what],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_restart_with_and_without_the_plan(tmp_path: Path) -> None:
    trained, _ = run(tmp_path, "train")
    with_plan, _ = run(tmp_path, "with plan")
    assert with_plan == trained
    without, log = run(tmp_path, "without plan")
    assert without != pytest.approx(trained, abs=1e-3)
    assert "Mods are OFF" in log and "its predictions differ" in log
    assert "layer_norm over 64 features" in log and "bias removed" in log
    assert "options={'plan': ...}" in log
