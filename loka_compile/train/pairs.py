"""Units of a study -> paired figures per seed and window, with intervals over the seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import numpy as np

from loka_compile.train import metrics
from loka_compile.train.environment import versions
from loka_compile.train.loop import Trace
from loka_compile.train.loop import TrainError
from loka_compile.train.share import given_up
from loka_compile.train.study import PLAIN_ARMS
from loka_compile.train.study import StudyConfig
from loka_compile.train.study import Unit
from loka_compile.train.study import load_trace
from loka_compile.train.summary import eval_from as default_eval_from

#: question -> (variant, base). Never mixed: each has its own base.
QUESTIONS = {"precision": ("loka", "bf16_mods"), "modelling": ("bf16_mods", "original")}
CONTROL = ("control", "bf16_mods")
#: The target: upper 95 % bound in percent over all, and in each window.
TARGET, WINDOW_TARGET = 0.02, 0.03


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Student's t interval of the mean; None for fewer than two values."""
    from scipy import stats

    if len(values) < 2:
        return None
    if np.ptp(values) == 0.0:
        return float(values[0]), float(values[0])
    found = stats.ttest_1samp(values, 0.0).confidence_interval(level)
    return float(found.low), float(found.high)


class Pairing:
    """Variant against base, seed by seed, on the same rows."""

    def __init__(self, variant: str, base: str, cuts: list[tuple[int, int]], start: int) -> None:
        self.variant, self.base, self.cuts, self.start = variant, base, cuts, start
        self.pairs: list[dict[str, Any]] = []

    def add(self, seed: int, variant: Trace, base: Trace) -> None:
        """Raises TrainError when the two did not see the same rows."""
        if not np.array_equal(variant.labels, base.labels):
            raise TrainError(f"seed {seed}: {self.variant} and {self.base} saw different rows")
        under_plan = self.variant not in PLAIN_ARMS
        swap = variant.swap_row if under_plan else 0
        start = self.start if swap is None else max(self.start, swap)
        whole = _rll(variant, base, start, len(base.labels)) if swap is not None else {}
        windows = [
            {
                "start": a,
                "end": b,
                "plan_active": swap is not None and a >= swap,
                **_rll(variant, base, a, b),
            }
            for a, b in self.cuts
        ]
        self.pairs.append({"seed": seed, "rll_percent": None, **whole, "windows": windows})

    def result(self) -> dict[str, Any]:
        """``pairs, mean, sd, ci95, window_upper95``, and the same of the expected loss if known."""
        out: dict[str, Any] = {
            "variant": self.variant,
            "base": self.base,
            "pairs": self.pairs,
            **self._over("rll_percent"),
        }
        if any("expected_rll_percent" in p for p in self.pairs):
            out["expected"] = self._over("expected_rll_percent")
        return out

    def _over(self, key: str) -> dict[str, Any]:
        values = [p[key] for p in self.pairs if p.get(key) is not None]
        bound = interval(values)
        upper: list[float | None] = []
        for i, (_, end) in enumerate(self.cuts):
            rows = [p["windows"][i] for p in self.pairs]
            mine = [w[key] for w in rows if w.get(key) is not None]
            # The warm-up is learnt from, not judged; before the swap there is nothing to judge.
            judged = end > self.start and all(w["plan_active"] for w in rows)
            found = interval(mine) if judged and len(mine) == len(rows) else None
            upper.append(None if found is None else found[1])
        lost = sum(p.get(key) is None for p in self.pairs)
        return {
            "mean": float(np.mean(values)) if values else None,
            "sd": float(np.std(values, ddof=1)) if len(values) > 1 else None,
            "ci95": list(bound) if bound else None,
            "window_upper95": upper,
            # Seeds whose variant gave no finite loss: they are in no mean, so they are said.
            "without_figure": lost,
        }


def _rll(variant: Trace, base: Trace, a: int, b: int) -> dict[str, float | None]:
    labels = base.labels[a:b]
    one, other = (metrics.measure(t.logits[a:b], labels) for t in (variant, base))
    out = {"rll_percent": metrics.relative_percent(one, other)}
    if base.truth is not None:
        truth = base.truth[a:b]
        losses = [metrics.expected_log_loss(t.logits[a:b], truth) for t in (variant, base)]
        finite = np.isfinite(losses).all() and losses[1] > 0
        out["expected_rll_percent"] = (
            float(100.0 * (losses[0] - losses[1]) / losses[1]) if finite else None
        )
    return out


def summarise(
    folder: Path,
    config: StudyConfig,
    seeds: Sequence[int],
    windows: int = 10,
    eval_from: int | None = None,
) -> dict[str, Any]:
    """The result of a study as plain JSON values; uses the units that are there.

    Top level: the precision question where both its arms ran, else the first pairing of the asked
    arms. ``modelling`` and ``aa_control`` stand apart.
    """
    held: dict[Unit, tuple[Trace, dict[str, Any]]] = {}
    for seed in seeds:
        for arm in config.arms:
            unit = Unit(seed, arm)
            if unit.path(folder).exists():
                held[unit] = load_trace(unit.path(folder))
    if not held:
        raise TrainError(f"{folder}: no unit has been trained yet; run again with more time")
    source = config.open()
    rows = len(next(iter(held.values()))[0].labels)
    start = default_eval_from(eval_from, source.name, rows)
    cuts = metrics.windows(rows, windows)

    def pair(variant: str, base: str) -> dict[str, Any] | None:
        pairing = Pairing(variant, base, cuts, start)
        for seed in seeds:
            one, other = held.get(Unit(seed, variant)), held.get(Unit(seed, base))
            if one and other:
                pairing.add(seed, one[0], other[0])
        return pairing.result() if pairing.pairs else None

    control = pair(*CONTROL)
    found = {name: pair(*arms) for name, arms in QUESTIONS.items()}
    asked = {arm for question in (*QUESTIONS.values(), CONTROL) for arm in question}
    others = {arm: pair(arm, "original") for arm in config.arms if arm not in asked}
    expected = (found["precision"] or {}).get("expected")
    if expected is not None:
        expected["verdict"] = verdict(expected, (control or {}).get("expected"))
    return {
        **(found["precision"] or {}),
        "modelling": found["modelling"],
        "aa_control": control,
        **({"against_original": others} if any(others.values()) else {}),
        "verdict": verdict(found["precision"], control),
        "fp8_share": _share(held),
        "given_up": _given_up(held),
        "arms": {arm: _arm(arm, held, start) for arm in config.arms if _seeds(arm, held)},
        "env": {
            **versions(config.torch_device()),
            "emulated": config.torch_device().type == "cpu",
            "date": datetime.now(timezone.utc).date().isoformat(),
        },
        "config": {**asdict(config), "data": source.name, "eval_from": start, "windows": windows},
        "data": {
            "source": source.name,
            "label": source.schema.label,
            "rows": rows,
            "synthetic": source.synthetic,
        },
        "sites": next((a["sites"] for u, (_, a) in held.items() if u.arm == "loka"), []),
    }


def verdict(precision: dict[str, Any] | None, control: dict[str, Any] | None) -> dict[str, Any]:
    """Is the loss no more than the target, overall and in every window after the swap."""
    if precision is None or precision["ci95"] is None:
        return {"passes": None, "why": "fewer than two seeds have both arms"}
    upper = precision["ci95"][1]
    judged = [w for w in precision["window_upper95"] if w is not None]
    worst = max(judged, default=None)
    passes = upper <= TARGET and worst is not None and worst <= WINDOW_TARGET
    why = f"upper 95 % bound {upper:+.4f} % (target {TARGET} %)"
    if worst is not None:
        why += f", worst window {worst:+.4f} % (target {WINDOW_TARGET} %)"
    if precision["without_figure"]:
        passes, why = False, f"{why}; {precision['without_figure']} seeds gave no finite loss"
    floor = control["sd"] if control else None
    if floor is not None:
        why += f"; A/A spread over seeds {floor:.4f} %"
    return {"passes": bool(passes), "why": why}


def _seeds(arm: str, held: dict[Unit, Any]) -> list[Any]:
    return [value for unit, value in held.items() if unit.arm == arm]


def _arm(arm: str, held: dict[Unit, Any], start: int) -> dict[str, Any]:
    """Means over seeds of log loss, NE, AUC and calibration over the headline rows."""
    found = [
        metrics.measure(t.logits[start:], t.labels[start:]).as_dict() for t, _ in _seeds(arm, held)
    ]
    keys = ("log_loss", "ne", "auc", "calibration")
    good = {k: [f[k] for f in found if f[k] is not None] for k in keys}
    speeds = [a["examples_per_s"] for _, a in _seeds(arm, held) if a["examples_per_s"]]
    return {
        **{k: float(np.mean(v)) if v else None for k, v in good.items()},
        "seeds": len(found),
        "non_finite": sum(f["non_finite"] > 0 for f in found),
        # Several processes may have shared the device: no measure of speed.
        "examples_per_s_shared": float(np.median(speeds)) if speeds else None,
    }


def _given_up(held: dict[Unit, Any]) -> dict[str, list[str]]:
    """Arm -> what it ran in high precision after a kernel had failed; of the first such seed."""
    found: dict[str, list[str]] = {}
    for unit, (_, about) in held.items():
        lost = given_up(about.get("sites") or [])
        if lost:
            found.setdefault(unit.arm, lost)
    return found


def _share(held: dict[Unit, Any]) -> dict[str, Any]:
    """FP8's mean share of steps and FLOPs, of the loka arm, or of each arm that ran FP8."""
    out: dict[str, Any] = {}
    for arm in dict.fromkeys(u.arm for u in held):
        if arm not in PLAIN_ARMS:
            every = [a["fp8_share"] for _, a in _seeds(arm, held)]
            out[arm] = {k: float(np.mean([s[k] or 0.0 for s in every])) for k in ("steps", "flops")}
    return out["loka"] if set(out) == {"loka"} else out
