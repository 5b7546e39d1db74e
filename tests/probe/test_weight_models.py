"""Matrix-normals of a run's weights: learnt at saves, kept, and what `quantify` draws from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from typer.testing import CliRunner

import loka_compile
from loka_compile import loka_backend
from loka_compile.cli import app
from loka_compile.probe import saver
from loka_compile.probe import session as sessions
from loka_compile.probe import weight_models
from loka_compile.probe.offline import NothingToQuantifyError
from loka_compile.probe.weight_models import WeightModels


def test_the_mean_follows_the_weights_without_a_start_bias() -> None:
    held = WeightModels()
    draws = [torch.randn(6, 4).double() for _ in range(5)]
    for w in draws:
        held.update({"a": w})
    one = held.held["a"]
    share = [0.1 * 0.9 ** (4 - i) for i in range(5)]
    want = sum(s * w for s, w in zip(share, draws, strict=True)) / sum(share)
    torch.testing.assert_close(one.mean, want)
    assert one.updates == one.followed == 5


def test_repeated_draws_give_the_covariance_of_their_kronecker_form() -> None:
    """Fresh independent weights about a fixed mean: the closed form (training gives no such)."""
    at = torch.arange(12, dtype=torch.float64)
    u, v = 0.8 ** (at[:, None] - at).abs(), 0.01 * 0.5 ** (at[:8, None] - at[:8]).abs()
    lu, lv = torch.linalg.cholesky(u), torch.linalg.cholesky(v)
    mean = torch.randn(12, 8).double()
    held = WeightModels()
    for _ in range(200):
        held.update({"a": mean + lu @ torch.randn(12, 8).double() @ lv.t()})
    one = held.held["a"]
    trace = float(one.v.diagonal().mean() * one.u.diagonal().mean())
    # An average of momentum 0.9 is itself off by 0.1 / 1.9 of the variance.
    assert trace == pytest.approx(0.01, rel=0.3)
    shape = torch.kron(one.v, one.u)
    want = torch.kron(v, u)
    cosine = (shape * want).sum() / shape.norm() / want.norm()
    assert cosine > 0.9


def test_what_is_passed_over(monkeypatch) -> None:
    held = WeightModels()
    held.update({"nan": torch.full((4, 4), float("nan")), "bias": torch.randn(4)})
    held.update({"wide": torch.randn(1, weight_models.WIDEST + 1)})
    for _ in range(3):
        held.update({"constant": torch.full((3, 2), 2.0), "zero": torch.zeros(3, 2)})
    torch.testing.assert_close(held.held["constant"].mean, torch.full((3, 2), 2.0).double())
    assert set(held.held) == {"constant", "zero"}
    assert all(torch.isfinite(one.sample()).all() for one in held.held.values())
    monkeypatch.setattr(weight_models, "BYTES", held.nbytes + 8 * 3 * 16)
    held.update({"fits": torch.randn(4, 4), "does not": torch.randn(4, 4)})
    assert "fits" in held.held and "does not" not in held.held


def test_from_training_to_the_command(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    options = {"inner": "eager", "emulate": True, "mods": "off", "heads": (), "probe_every": 1}
    chosen = {"probe_weight_model": "matrix_normal", "probe_dir": tmp_path, "recipes": "rowwise"}
    run = torch.compile(model, backend=loka_backend, options={**options, **chosen})
    one = sessions.session(tmp_path, weight_model="matrix_normal")
    one.save_every = 4
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(10):
        run(torch.randn(24, 32)).square().sum().backward()
        sgd.step()
    loka_compile.probe_save()
    path = one._saver.path
    loaded = saver.load_folder(tmp_path)
    held = loaded.weight_models["0"]
    # Saves at steps 4 and 8, one of which a busy thread may skip, and now.
    assert held.updates >= 2 and held.mean.shape == (64, 32)
    assert (held.mean - model[0].weight.detach()).norm() < 0.5 * held.mean.norm()
    with safe_open(path, "pt") as file:
        assert file.get_tensor("0|w|u").dtype == torch.float64
    kernels = {"kernels": ["torch:rowwise"], "models": ["diagonal"]}
    # wgrad reads no weight.
    kernels["directions"] = ["fwd", "dgrad"]
    found = loka_compile.quantify(None, loaded, weight_model="matrix_normal", **kernels)
    assert {r["weight"] for r in found.rows} == {f"matrix-normal of {held.updates} updates"}
    live = loka_compile.quantify(model, weight_model="matrix_normal", **kernels)
    assert [r["mere_clamped"] for r in live.rows] == [r["mere_clamped"] for r in found.rows]
    arguments = ["quantify", str(tmp_path), "--weight-model", "matrix_normal"]
    arguments += ["--kernels", "torch:rowwise", "--models", "diagonal", "--samples", "1"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "q.json")])
    assert result.exit_code == 0, result.output
    # The next run of this folder goes on.
    sessions._SESSIONS.pop(tmp_path.absolute())
    again = sessions.session(tmp_path, weight_model="matrix_normal")
    assert again.weight_models()["0"].updates == held.updates
    sessions._SESSIONS.pop(tmp_path.absolute())


def test_without_any_the_error_names_the_option() -> None:
    with pytest.raises(NothingToQuantifyError, match="weight_model 'normal'"):
        loka_compile.quantify(nn.Linear(4, 4), weight_model="normal")
    with pytest.raises(NothingToQuantifyError, match="probe_weight_model='matrix_normal'"):
        loka_compile.quantify(nn.Linear(4, 4), weight_model="matrix_normal")
