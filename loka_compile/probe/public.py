"""What users ask of the Probe while training: numbers for a logger, drift alarms, a save now."""

from __future__ import annotations

from pathlib import Path

from loka_compile.probe.drift import DriftEvent
from loka_compile.probe.listing import metrics
from loka_compile.probe.session import sessions


def probe_metrics(prefix: str = "loka") -> dict[str, float]:
    """Finite numbers of every probed site, for TensorBoard and other loggers.

    `<prefix>/<site>/<input|gradient|weight>/<what>`; `what` is, among others, `rms_weighted`,
    `amax`, `zero_share`, `non_finite`. Waits for the device once per site.
    """
    found: dict[str, float] = {}
    for one in sessions():
        found.update(metrics(one.statistics(), one.weights(), prefix))
    return found


def probe_events() -> list[DriftEvent]:
    """Drift alarms so far, oldest first: site, quantity, step, factor."""
    events = [e for one in sessions() for e in one.drift.events]
    return sorted(events, key=lambda e: e.step)


def probe_save() -> list[Path]:
    """Write the state of every `probe_dir` now; the files written."""
    return [path for one in sessions() if (path := one.save()) is not None]
