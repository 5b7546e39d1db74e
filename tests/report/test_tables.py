"""Site tables: what is shown, what is merged, and that no line is too long."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from loka_compile.options import Environment
from loka_compile.report import tables
from loka_compile.report.collect import GraphReport

HIGH = {"kernel": "high_precision", "mere_clamped": None, "speedup": None, "reason": ""}
HEAD = {**HIGH, "reason": "a head stays in high precision"}


def fp8(error=0.05, speedup=None, kernel="torch:rowwise"):
    return {
        "kernel": kernel,
        "mere_clamped": error,
        "speedup": speedup,
        "reason": "",
        "source": "emulated",
    }


def refused(error, reason):
    return {**HIGH, "mere_clamped": error, "reason": reason}


def site(name, fwd, dgrad=None, wgrad=None, **other):
    directions = {"fwd": fwd, "dgrad": dgrad or fwd, "wgrad": wgrad or fwd}
    row = {"name": name, "M": 64, "K": 32, "N": 16, "dtype": "float32", "count": 1, "fused": None}
    return {**row, **other, "directions": directions}


def graph(label, *sites):
    return GraphReport(label, [], Environment(False, (), None), sites=list(sites))


def test_lines_are_aligned_and_short_names_are_used():
    head, first, second, why = tables.site_lines(
        [site("mlp.0", fp8(0.05), fp8(0.07, kernel="torch:rowwise+emulated")), site("head", HEAD)]
    )
    assert head.split() == ["name", "M", "K", "N", "fwd", "dgrad", "wgrad", "error", "speedup"]
    kernels = ["torch:rowwise"] * 3
    assert first.split() == ["mlp.0", "64", "32", "16", *kernels, "0.070", "n/a"]
    assert second.split() == ["head", "64", "32", "16", "high", "high", "high", "-", "n/a"]
    assert head.index("dgrad") == second.index("high", second.index("high") + 1)
    assert why.strip() == "high: a head stays in high precision"


def test_error_is_the_worst_fp8_direction_else_that_of_the_refused_kernel():
    assert tables.error_of(site("a", fp8(0.05), refused(0.9, "x"))) == 0.05
    assert tables.error_of(site("a", refused(0.3, "x"), refused(0.9, "x"))) == 0.9
    assert tables.error_of(site("a", HEAD)) is None


@pytest.mark.parametrize("order", [(math.nan, 0.1, 0.2), (0.1, 0.2, math.nan)])
def test_nan_is_the_worst_error_wherever_it_stands(order):
    assert math.isnan(tables.error_of(site("a", *map(fp8, order))))


def test_speedups_stand_per_direction():
    line = tables.site_lines([site("a", fp8(speedup=1.5), fp8(speedup=1.25), HEAD)])[1]
    assert line.endswith("1.50/1.25/-")


def test_equal_reasons_are_said_once():
    why = "K = 55 is not a multiple of 16"
    one = site("a", fp8(), refused(None, why), refused(None, why))
    assert tables.reasons_of(one) == [f"dgrad, wgrad: {why}"]
    assert tables.reasons_of(site("a", refused(None, why))) == [why]


def test_the_break_even_batch_shows_for_any_kernel():
    """Chosen or refused: the batch from which on FP8 pays is what a user can act on."""
    pays = "FP8 pays from M = 812"
    chosen = {**fp8(0.05), "reason": f"speedup 1.01, but its chain gains by it; {pays}"}
    forced = {**fp8(0.05), "reason": "forced by option"}
    one = site("a", chosen, forced, refused(0.1, f"torch:rowwise: speedup 0.90 < 1.05; {pays}"))
    assert tables.pays_of(one) == [f"fwd: {pays}"]
    lines = tables.site_lines([one])
    assert lines[2].strip() == f"high: wgrad: torch:rowwise: speedup 0.90 < 1.05; {pays}"
    assert lines[3].strip() == f"fp8:  fwd: {pays}"
    out = io.StringIO()
    Console(file=out, width=300).print(tables.site_table([one]))
    assert out.getvalue().count(pays) == 2
    assert tables.pays_of(site("a", forced)) == []


@pytest.mark.parametrize(
    "name",
    [
        "a",
        # Longer than any column, with and without places to break.
        "backbone.layers.12.interaction.cross.low_rank.projection.input_gate.linear_in",
        "x" * 150,
    ],
)
def test_no_line_is_too_long(name):
    kernels = [fp8(speedup=12.25, kernel="torchao:rowwise_with_gw_hp")] * 2
    long = refused(0.5, "this goes on and on " * 20 + "y" * 130)
    row = site(name, *kernels, long, M=1048576, K=131072, N=131072, count=3)
    lines = tables.site_lines([row, site("head", HEAD)])
    assert max(map(len, lines)) <= tables.WIDTH
    # Nothing is cut off: the name column, read downwards, holds the whole name.
    width = tables._widths([tables.HEADER, tables._cells(row)])[0]
    column = "".join(line[:width].strip() for line in lines[1:]).replace(" ", "")
    assert f"{name}x3" in column


def test_an_empty_report_has_a_header_only():
    assert len(tables.site_lines([])) == 1


def test_rich_table_shows_reasons_and_brackets_as_they_are():
    out = io.StringIO()
    rows = [site("m[0]", fp8()), site("head", HEAD)]
    Console(file=out, width=140).print(tables.site_table(rows))
    shown = out.getvalue()
    assert "m[0]" in shown and "a head stays in" in shown and "torch:rowwise" in shown


def test_a_training_row_wins_over_a_no_grad_row_in_any_order():
    trained, bare = site("a", fp8()), site("a", HEAD)
    graphs = [graph("training graph", trained), graph("no grad graph", bare, site("b", HEAD))]
    for order in (graphs, graphs[::-1]):
        merged = {s["name"]: s for s in tables.merge_sites(order)}
        assert sorted(merged) == ["a", "b"]
        assert merged["a"] is trained


def test_a_decided_row_wins_over_one_that_is_still_probed():
    decided, probing = site("a", fp8()), site("a", {**HIGH, "reason": "probing"})
    graphs = [graph("training graph", decided), graph("training graph", probing)]
    assert tables.merge_sites(graphs) == [decided]


def test_equal_names_of_other_widths_are_other_sites():
    graphs = [graph("training graph", site("a", fp8())), graph("x", site("a", HEAD, K=8))]
    assert len(tables.merge_sites(graphs)) == 2


def test_coverage_counts_reasons_by_kind():
    rows = [
        site("a", fp8(), HEAD, fused="a+block_norm"),
        site("b", refused(0.31, "torch:rowwise: clamped MERE 0.31 >= 0.2")),
        site("c", refused(0.45, "torch:rowwise: 3 % of rows off by more than 10 %")),
        site("d", refused(0.1, "torch:rowwise: speedup 0.91 < 1.05"), count=2),
        site("e", HEAD),
    ]
    found = tables.coverage(rows)
    assert found == {
        "linears": 6,
        "fused": 1,
        "fp8": 1,
        "high_precision": 5,
        "reasons": {
            "not accurate enough": 2,
            "not fast enough": 2,
            "a head stays in high precision": 1,
        },
    }
    assert "6 linears found, 1 fused, 1 with FP8" in tables.coverage_line(rows)
