"""CUSUM: no alarm on steady series, a prompt one on a shift, one event per shift."""

from __future__ import annotations

import numpy as np

from loka_compile.probe.drift import DriftWatch


def test_steady_noise_hardly_alarms() -> None:
    random = np.random.default_rng(0)
    watch = DriftWatch()
    for series in range(20):
        for step in range(300):
            watch.feed(f"s{series}", "RMS", step, 2.0 ** random.normal(0, 0.04))
    assert len(watch.events) <= 2


def test_a_shift_of_a_quarter_is_caught_and_named_once() -> None:
    random = np.random.default_rng(1)
    watch = DriftWatch()
    for step in range(120):
        scale = 1.25 if step >= 100 else 1.0
        watch.feed("mlp.0", "input RMS", step, scale * 2.0 ** random.normal(0, 0.04))
    (event,) = watch.events
    assert event.site == "mlp.0" and 100 <= event.step <= 106
    assert 1.15 < event.factor < 1.35
    assert "mlp.0" in str(event) and "input RMS" in str(event)


def test_falls_zeros_and_non_finite_values() -> None:
    watch = DriftWatch()
    for step in range(60):
        watch.feed("a", "RMS", step, 8.0 if step < 50 else 2.0)
        watch.feed("b", "RMS", step, 0.0)
        watch.feed("c", "RMS", step, float("nan") if step % 2 else 1.0)
    (event,) = watch.events
    assert event.site == "a" and abs(event.factor - 0.25) < 0.01
