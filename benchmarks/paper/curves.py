"""The plot of a quality figure: RLL per window over the run; a panel per case, a line per arm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loka_compile.files import replacing
from loka_compile.train.pairs import interval

#: Beyond it a curve says "lost", and would flatten all others.
SHOWN = 3.0


def draw(
    cases: Mapping[str, Mapping[str, dict[str, Any]]], title: str, paper: str, target: Path
) -> str:
    """``cases``: panel -> arm -> pairing (``Pairing.result``). Means over seeds, with 95 % bands.

    Writes ``target`` with the suffix .svg and returns where it went; without matplotlib, why not.
    """
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed (pip install 'loka-compile[train]')"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(cases), figsize=(4.6 * len(cases), 3.4), squeeze=False)
    for axis, (name, arms) in zip(axes[0], cases.items(), strict=True):
        for i, (arm, pairing) in enumerate(arms.items()):
            ends, means, low, high = curve(pairing)
            axis.plot(ends, means, color=f"C{i}", linewidth=1.6, label=arm)
            axis.fill_between(ends, low, high, color=f"C{i}", alpha=0.15)
        axis.axhline(0.0, color="black", linewidth=0.6)
        low, high = axis.get_ylim()
        axis.set_ylim(max(low, -SHOWN), min(high, SHOWN))
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("thousand rows")
        axis.set_ylabel("RLL, % (positive is worse)")
        axis.legend(fontsize=7)
    figure.suptitle(f"{title}. The paper: {paper}", fontsize=8, wrap=True)
    figure.tight_layout()
    path = target.with_suffix(".svg")
    # A fixed salt and no date: the same figures give the same file.
    with replacing(path) as temporary, matplotlib.rc_context({"svg.hashsalt": "loka"}):
        figure.savefig(temporary, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return str(path)


def curve(pairing: dict[str, Any]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Ends of the windows in thousand rows; mean, lower and upper bound; NaN where no seed has
    a finite loss."""
    ends = [w["end"] / 1000 for w in pairing["pairs"][0]["windows"]]
    means, low, high = [], [], []
    for i in range(len(ends)):
        found = [p["windows"][i]["rll_percent"] for p in pairing["pairs"]]
        known = [v for v in found if v is not None]
        mean = sum(known) / len(known) if known else float("nan")
        bounds = interval(known) or (mean, mean)
        means.append(mean)
        low.append(bounds[0])
        high.append(bounds[1])
    return ends, means, low, high
