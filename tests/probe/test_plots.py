"""Pictures of `loka quantify --plots`: a file per site, with the right series in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from loka_compile.cli import app
from loka_compile.probe import offline
from loka_compile.probe import plots
from loka_compile.probe import store
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.statistics import update

pytest.importorskip("matplotlib")

KERNELS = ["torch:tensorwise", "torch:rowwise"]
PNG = b"\x89PNG\r\n\x1a\n"


def state(*sites: str) -> dict[tuple[str, str], Statistics]:
    found = {}
    for site in sites:
        x = Statistics.empty(32, torch.float32, torch.device("cpu"))
        for _ in range(8):
            update(torch.randn(64, 32).relu(), x)
        found[site, "x"] = x
    return found


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved."""
    from matplotlib.figure import Figure

    kept = []
    own = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (kept.append(self), own(self, *a, **k))
    )
    return kept


def labels(axes) -> list[str]:
    return axes.get_legend_handles_labels()[1]


def test_a_picture_per_site_with_every_model_and_kernel(tmp_path: Path, figures) -> None:
    held = state("mlp.0", "a#1", "a_1")
    weights = {"mlp.0": torch.randn(16, 32), "a": torch.randn(16, 32), "a_1": torch.randn(16, 32)}
    found = offline.quantify(weights, held, kernels=KERNELS, models=["reservoir"])
    written = plots.save_all(held, found, tmp_path, weights)
    # Two sites whose names are spelt alike as file names are two files.
    assert sorted(p.name for p in written) == ["a_1-2.png", "a_1.png", "mlp.0.png"]
    assert all(p.read_bytes().startswith(PNG) for p in written)
    left, right = figures[-1].axes
    assert labels(left) == ["real rows", "gaussian", "diagonal", "standard_normal"]
    assert labels(right) == KERNELS
    # ReLU: the real rows have nothing below zero, the Gaussians have.
    reach = {p.get_label(): p.get_xy()[:, 0].min() for p in left.patches}
    assert reach["real rows"] == 0 > reach["gaussian"]
    for line in right.lines:
        size, error = line.get_data()
        # e4m3: a few percent of the largest outputs.
        assert len(size) > 3 and 0.002 < error[-1] / size[-1] < 0.1


def test_without_weights_or_rows(tmp_path: Path, figures) -> None:
    """From a file without rows: the moments' models remain, and bars for the measures."""
    held = state("mlp.0")
    path = store.save(
        held, tmp_path / "p.safetensors", weights={"mlp.0": torch.ones(8, dtype=torch.float64)}
    )
    save_file({"mlp.0.weight": torch.randn(16, 32)}, str(tmp_path / "w.safetensors"))
    folder = tmp_path / "plots"
    arguments = ["quantify", str(path), "--kernels", "torch:rowwise", "--plots", str(folder)]
    arguments += ["--weights", str(tmp_path / "w.safetensors"), "--out", str(tmp_path / "q.json")]
    result = CliRunner().invoke(app, [*arguments, "--models", "diagonal,standard_normal"])
    assert result.exit_code == 0, result.output
    assert "plot: " in result.output
    assert (folder / "mlp.0.png").read_bytes().startswith(PNG)
    left, right = figures[-1].axes
    assert labels(left) == ["diagonal", "standard_normal"]
    assert [t.get_text() for t in right.get_yticklabels()] == [
        "torch:rowwise / diagonal",
        "torch:rowwise / standard_normal",
    ]
    assert all(0 < bar.get_width() < 0.2 for bar in right.patches)
    # With rows, the command draws errors too.
    store.save(held, path, rows=True)
    result = CliRunner().invoke(app, [*arguments, "--models", "reservoir"])
    assert result.exit_code == 0 and labels(figures[-1].axes[1]) == ["torch:rowwise"]


def test_medians_by_hand() -> None:
    size = torch.cat([torch.full((20,), 2.0), torch.full((20,), 200.0), torch.tensor([0.0, 7.0])])
    error = torch.cat([torch.arange(20.0), torch.full((20,), 3.0), torch.tensor([9.0, 9.0])])
    middle, median = plots.medians(size.double(), error.double())
    # log10 2 = 0.30: the second quarter of the decade, centre 10^0.375.
    torch.testing.assert_close(middle, torch.tensor([10**0.375, 10**2.375]))
    assert median.tolist() == [9.0, 3.0]
