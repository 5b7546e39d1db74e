"""One picture per site: its input's histogram against the models, and error against magnitude."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loka_compile.errors import LokaError
from loka_compile.lowering.recipes import EMULATED
from loka_compile.probe import models as distributions
from loka_compile.probe import quantify as qt
from loka_compile.probe.offline import Probed
from loka_compile.probe.offline import Quantified
from loka_compile.probe.offline import probed_sites
from loka_compile.probe.statistics import Statistics


class NoMatplotlibError(LokaError):
    def __init__(self) -> None:
        super().__init__("plots need matplotlib; run: pip install matplotlib")


def save_all(
    state: Mapping[tuple[str, str], Statistics],
    found: Quantified,
    folder: str | Path,
    weights: Mapping[str, Tensor] | None = None,
) -> list[Path]:
    """Write `<site>.png` for every site of `found` whose rows are held; the files written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise NoMatplotlibError from None
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    sites = {one.name: one for one in probed_sites(weights, state)} if weights else {}
    written = []
    for name in dict.fromkeys(row["site"] for row in found.rows):
        x = state[(name, "x")]
        figure = Figure(figsize=(9, 3.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        _histogram(left, name, x)
        if name in sites:
            _errors(right, sites[name], found)
        else:
            _measures(right, name, found)
        path = target / (re.sub(r"[^\w.-]+", "_", name) + ".png")
        figure.savefig(path, dpi=120)
        written.append(path)
    return written


def _histogram(axes: Any, name: str, x: Statistics) -> None:
    rows = x.reservoir().float().cpu()
    axes.set_title(f"{name}: input")
    for model in distributions.MODELS:
        if rows.shape[0] == 0 and model in ("reservoir", "gaussian"):
            continue
        pick = torch.arange(max(rows.shape[0], 1))
        held = rows if rows.shape[0] else torch.zeros(1, x.features)
        drawn = distributions.rows(model, held, x, pick, seed=0)
        values = drawn.flatten().float().cpu()
        axes.hist(values.numpy(), bins=80, histtype="step", density=True, label=model)
    axes.set_yscale("log")
    axes.set_xlabel("value")
    axes.set_ylabel("density")
    axes.legend(fontsize=7)


def _errors(axes: Any, site: Probed, found: Quantified) -> None:
    """|out - ref| against |ref| of the forward, for each kernel."""
    axes.set_title("forward: error against magnitude")
    kernels = [r["kernel"] for r in found.rows if r["site"] == site.name]
    for kernel in dict.fromkeys(kernels):
        for sample in qt.draw(site.x, site.gy, site.dtype, samples=1):
            out, ref = qt.run("fwd", sample, site.w.to(site.dtype), kernel + EMULATED)
            pick = torch.randperm(ref.numel(), generator=torch.Generator().manual_seed(0))[:2000]
            size = ref.flatten()[pick].abs().float().cpu()
            error = (out.float() - ref.float()).flatten()[pick].abs().cpu()
            axes.scatter(size.numpy(), error.numpy(), s=2, alpha=0.4, label=kernel)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("|reference|")
    axes.set_ylabel("|error|")
    axes.legend(fontsize=7)


def _measures(axes: Any, name: str, found: Quantified) -> None:
    """Without weights at hand: the clamped MERE of each kernel and model."""
    rows = [r for r in found.rows if r["site"] == name and r["direction"] == "fwd"]
    labels = [f"{r['kernel']} / {r['distribution']}" for r in rows]
    axes.set_title("forward: clamped MERE")
    axes.barh(labels, [r["mere_clamped"] for r in rows])
    axes.tick_params(axis="y", labelsize=5)
