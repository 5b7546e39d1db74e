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
    """Write `<site>.png` for every site of `found`; the files written.

    With weights and held rows: each kernel's error against magnitude; else bars of the measures.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise NoMatplotlibError from None
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    sites = {one.name: one for one in probed_sites(weights, state)} if weights else {}
    written: list[Path] = []
    for name in dict.fromkeys(row["site"] for row in found.rows):
        figure = Figure(figsize=(9, 3.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        _histogram(left, name, state[(name, "x")])
        if name in sites and state[(name, "x")].reservoir().shape[0]:
            _errors(right, sites[name], found)
        else:
            _measures(right, name, found)
        path = _free(target, re.sub(r"[^\w.-]+", "_", name), written)
        figure.savefig(path, dpi=120)
        written.append(path)
    return written


def _free(folder: Path, stem: str, taken: list[Path]) -> Path:
    """`a#1` and `a_1` are two sites, and must not be one file."""
    path, number = folder / f"{stem}.png", 1
    while path in taken:
        number += 1
        path = folder / f"{stem}-{number}.png"
    return path


def _histogram(axes: Any, name: str, x: Statistics) -> None:
    """Values of the rows held, and of as many rows of each model that can be drawn."""
    rows = x.reservoir().float().cpu()
    axes.set_title(f"{name}: input")
    for model in distributions.MODELS:
        if rows.shape[0] == 0 and distributions.needs_rows(model, x):
            continue
        pick = torch.arange(rows.shape[0] or qt.ROWS)
        held = rows if rows.shape[0] else torch.zeros(1, x.features, dtype=torch.float32)
        values = distributions.rows(model, held, x, pick, seed=0).flatten().float().cpu()
        label = "real rows" if model == "reservoir" else model
        axes.hist(values.numpy(), bins=80, histtype="step", density=True, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("value")
    axes.set_ylabel("density")
    axes.legend(fontsize=7)


def _errors(axes: Any, site: Probed, found: Quantified) -> None:
    """|out - ref| against |ref| of the forward: some elements, and the median per magnitude."""
    axes.set_title("forward: error against magnitude")
    kernels = list(dict.fromkeys(r["kernel"] for r in found.rows if r["site"] == site.name))
    for index, kernel in enumerate(kernels):
        # Ever thinner: kernels that do alike lie on one line.
        width = 1.2 + 1.2 * (len(kernels) - 1 - index)
        for sample in qt.draw(site.x, site.gy, site.dtype, samples=1):
            out, ref = qt.run("fwd", sample, site.w.to(site.dtype), kernel + EMULATED)
            size = ref.flatten().abs().double().cpu()
            error = (out.double().cpu() - ref.double().cpu()).flatten().abs()
            middle, median = medians(size, error)
            (line,) = axes.plot(middle.numpy(), median.numpy(), lw=width, label=kernel)
            pick = torch.randperm(len(size), generator=torch.Generator().manual_seed(0))[:1000]
            axes.scatter(
                size[pick].numpy(), error[pick].numpy(), s=2, alpha=0.2, color=line.get_color()
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("|reference|")
    axes.set_ylabel("|error|")
    axes.legend(fontsize=7)


def medians(size: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Middle of each quarter decade of `size` (n,) > 0, and the median of `error` (n,) in it.

    Bins of fewer than 16 elements, whose median says little, are left out.
    """
    live = size > 0
    bins = torch.floor(4 * size[live].log10()).long()
    middle, median = [], []
    for one in bins.unique():
        inside = error[live][bins == one]
        if inside.numel() >= 16:
            middle.append(10 ** ((float(one) + 0.5) / 4))
            median.append(float(inside.median()))
    return torch.tensor(middle), torch.tensor(median)


def _measures(axes: Any, name: str, found: Quantified) -> None:
    """Without weights at hand: the clamped MERE of each kernel and model."""
    rows = [r for r in found.rows if r["site"] == name and r["direction"] == "fwd"]
    labels = [f"{r['kernel']} / {r['distribution']}" for r in rows]
    axes.set_title("forward: clamped MERE")
    axes.barh(labels, [r["mere_clamped"] for r in rows])
    axes.tick_params(axis="y", labelsize=5)
