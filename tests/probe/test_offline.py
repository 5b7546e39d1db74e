"""`loka_compile.quantify` on a live model and on saved state; the command beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import loka_compile
from loka_compile import loka_backend
from loka_compile.cli import app
from loka_compile.probe import store
from loka_compile.probe.listing import collect
from loka_compile.probe.offline import NothingToQuantifyError


def probed() -> nn.Module:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    options = {"inner": "eager", "emulate": True, "mods": "off", "heads": (), "probe_every": 0}
    run = torch.compile(model, backend=loka_backend, options=options)
    for _ in range(8):
        run(torch.randn(40, 32)).square().sum().backward()
    return model


def test_live_model_and_saved_state_agree(tmp_path: Path) -> None:
    model = probed()
    chosen = {"kernels": ["torch:rowwise"], "models": ["reservoir", "standard_normal"]}
    live = loka_compile.quantify(model, **chosen)
    assert {(r["site"], r["direction"]) for r in live.rows} == {
        (s, d) for s in ("0", "2") for d in ("fwd", "dgrad", "wgrad")
    }
    for row in live.rows:
        assert row["mere_clamped_lower"] <= row["mere_clamped"] <= row["mere_clamped_upper"]
        assert row["us"] is None and row["emulated"] and row["weight"] == "model"
    from loka_compile.ledger import model_entries

    state = collect(entry for _, entry in model_entries(model))
    path = store.save(state, tmp_path / "probe.safetensors", rows=True)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    saved = loka_compile.quantify(weights, path, **chosen)
    assert [r["mere_clamped"] for r in saved.rows] == [r["mere_clamped"] for r in live.rows]
    text = live.table()
    assert "torch:rowwise" in text and text.count("\n") == len(live.rows) + 1
    # The command, on the same file.
    save_file(weights, str(tmp_path / "w.safetensors"))
    out = tmp_path / "q.json"
    arguments = ["quantify", str(path), "--weights", str(tmp_path / "w.safetensors")]
    arguments += ["--kernels", "torch:rowwise", "--models", "reservoir", "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert len(json.loads(out.read_text())["rows"]) == 6


def test_nothing_probed_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NothingToQuantifyError, match="train a few steps"):
        loka_compile.quantify(nn.Linear(4, 4))
    result = CliRunner().invoke(app, ["quantify", str(tmp_path)])
    assert result.exit_code == 2 and "no probe-" in result.output
