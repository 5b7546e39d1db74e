"""Traces of the arms -> figures: headline, whole range, windows."""

from __future__ import annotations

from typing import Any

from loka_compile.train import metrics
from loka_compile.train.loop import Trace
from loka_compile.train.result import ArmResult
from loka_compile.train.result import Window


def summarise(
    traces: dict[str, Trace], seconds: dict[str, float], start: int, window_count: int
) -> dict[str, Any]:
    """The quality part of a ``CompareResult``: arms, percentages, windows, headline rows.

    ``start`` is the first row that the headline figures may use.
    """
    first = next(iter(traces.values()))
    labels, rows = first.labels, len(first.labels)
    swap = traces["loka"].swap_row if "loka" in traces else 0
    if swap is not None:
        # Before the swap the loka arm runs in high precision: counting it would dilute the error.
        start = max(start, swap)

    def over(a: int, b: int) -> dict[str, metrics.Metrics]:
        return {n: metrics.measure(t.logits[a:b], labels[a:b]) for n, t in traces.items()}

    head, whole = over(start, rows), over(0, rows)
    arms = {
        name: ArmResult(
            m.log_loss,
            m.ne,
            m.auc,
            traces[name].examples_per_s,
            seconds[name],
            m.non_finite,
            {k: getattr(whole[name], k) for k in ("log_loss", "ne", "auc")},
        )
        for name, m in head.items()
    }
    parts = []
    for a, b in metrics.windows(rows, window_count):
        found = over(a, b)
        active = "loka" in traces and swap is not None and a >= swap
        ne = {n: m.ne for n, m in found.items()}
        parts.append(Window(a, b, active, *_percentages(found), ne))
    # Without one step under the plan there is nothing to say about its precision.
    rll, mods = _percentages(head)
    everywhere = _percentages(whole)
    return {
        "arms": arms,
        "rll_percent": rll if swap is not None else None,
        "mods_vs_original_percent": mods,
        "windows": parts,
        "whole_range": {
            "rll_percent": everywhere[0],
            "mods_vs_original_percent": everywhere[1],
        },
        "headline_rows": (start, rows),
    }


def _percentages(found: dict[str, metrics.Metrics]) -> tuple[float | None, float | None]:
    def against(variant: str, base: str) -> float | None:
        if variant not in found or base not in found:
            return None
        return metrics.relative_percent(found[variant], found[base])

    return against("loka", "bf16_mods"), against("bf16_mods", "original")


def eval_from(asked: int | None, source: str, rows: int) -> int:
    """First row of the headline figures: the warm-up before it is learnt from, not scored.

    By default a fifth of the rows, at least the 20,000 that the dense statistics come from where
    three times as many exist, and 40,000 for kuairand, whose published figures start there.
    """
    if asked is not None:
        return asked
    if source == "kuairand" and rows > 80_000:
        return 40_000
    return max(rows // 5, min(20_000, rows // 3))
