"""Geometry of the plots."""

from __future__ import annotations

from loka_compile.report import plots


def choice(kernel, error=None, us=None, speedup=None):
    return {"kernel": kernel, "mere_clamped": error, "us": us, "speedup": speedup}


def site(name, choice):
    return {
        "name": name,
        "count": 1,
        "directions": dict.fromkeys(("fwd", "dgrad", "wgrad"), choice),
    }


def test_plots_against_speedup_and_time():
    sites = [
        site("a", choice("torch:rowwise", 0.0625, 10.0, 2.0)),
        site("b", choice("high_precision", 0.3, 8.0, 0.5)),
        site("c", choice("torch:rowwise", float("nan"))),
    ]
    plot = plots.error_plot(sites)
    assert plot.title == "Error against speedup" and "3 errors are not finite" in plot.note
    assert [p.runs for p in plot.points] == [True] * 3 + [False] * 3
    for p in plot.points:
        assert plot.left <= p.x <= plot.right and plot.top <= p.y <= plot.bottom
    # b stays in high precision, which takes half of the refused kernel's time.
    bar = plots.time_bars(sites)[0]
    assert (bar.high_us, bar.chosen_us, bar.sites) == (24.0, 14.0, 2)
    assert (
        plots.error_plot([site("d", choice("high_precision"))]) is None
        and plots.time_bars([]) == []
    )
