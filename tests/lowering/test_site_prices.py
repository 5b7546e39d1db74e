"""Prices of a site: sums of its parts, what a producer adds, and whole directions without parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loka_compile.lowering.cost_store import CostTable
from loka_compile.lowering.cost_table import CostRow
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.measure import Cost
from loka_compile.lowering.parts import HANDED
from loka_compile.lowering.parts import WIDENED
from loka_compile.lowering.parts import Place
from loka_compile.lowering.parts import rules_of
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.site_prices import SitePrices
from loka_compile.lowering.site_prices import add

CPU = torch.device("cpu")
BARE = Place(GemmShape(64, 128, 256), torch.bfloat16, CPU)
FUSED = replace(BARE, epilogue="block_norm:256:hard_swish")
TENSOR = "torch:tensorwise"
A, B = rules_of(TENSOR, "fwd")
GY = rules_of(TENSOR, "dgrad")[0]


def _table(place: Place, *, kernels=(HIGH_PRECISION, TENSOR), more=()) -> CostTable:
    """GEMMs cost 100 in high precision and 10 in FP8; parts are told apart by their sums."""
    keys = {
        place.gemm(d, k): 100.0 if k == HIGH_PRECISION else 10.0
        for k in kernels
        for d in DIRECTIONS
    }
    keys[place.quantise("w", (B, None))] = 0.5
    keys[place.quantise("w", (None, B))] = 0.25
    keys[place.quantise("x", (A, None))] = 1.0
    keys[place.quantise("x", (None, B))] = 2.0
    keys[place.quantise("gy", (GY, None))] = 3.0
    keys[place.quantise("gy", (None, GY))] = 4.0
    keys[place.widen()] = 0.125
    if place.epilogue:
        keys[place.epilogue_step()] = 5.0
        keys[place.gradient(None)] = 6.0
        keys[place.gradient((GY, GY))] = 7.0
        for out, us in (("y", 12.0), ("y8", 11.0), ("y8t", 13.0)):
            keys[place.gemm("fwd", "loka:tensorwise", out)] = us
    keys.update(more)
    return CostTable(None, [CostRow(k, us, "2026-01-01") for k, us in keys.items()])


def test_sums_of_parts():
    prices = SitePrices(FUSED, tune="never", table=_table(FUSED))
    assert prices.apart
    assert prices.fwd(HIGH_PRECISION) == Cost(105.0, "table")
    assert prices.fwd(TENSOR) == Cost(10 + 0.5 + 1.0 + 5.0, "table")
    assert prices.fwd("loka:tensorwise") == Cost(12 + 0.5 + 1.0, "table")
    assert prices.back("dgrad", TENSOR) == Cost(10 + 3.0 + 0.25, "table")
    assert prices.back("dgrad", TENSOR, ready=True) == Cost(10.25, "table")
    assert prices.back("wgrad", TENSOR) == Cost(10 + 4.0 + 2.0, "table")
    assert prices.back("wgrad", HIGH_PRECISION, x=WIDENED) == Cost(100.125, "table")
    assert prices.gradient(None) == Cost(6.0, "table")
    assert prices.gradient((GY, GY)) == Cost(7.0, "table")
    assert prices.alone("dgrad", HIGH_PRECISION) == Cost(103.0, "table")
    assert prices.alone("fwd", TENSOR) == prices.fwd(TENSOR)


def test_what_was_added_before_the_norm_wants_its_gradient_in_bf16():
    added = replace(FUSED, epilogue=FUSED.epilogue + "+add")
    prices = SitePrices(added, tune="never", table=_table(added))
    assert prices.gradient(None) == Cost(6.0, "table")
    assert prices.gradient((GY, GY)) is None


def test_a_producer_is_charged_to_its_reader():
    producer = SitePrices(FUSED, tune="never", table=_table(FUSED))
    prices = SitePrices(BARE, tune="never", producer=producer, table=_table(BARE))
    # It writes e4m3 instead of bf16, a microsecond less, and the transpose for two more.
    assert prices.fwd(TENSOR, handed=True) == Cost(10 + 0.5 - 1.0, "table")
    assert prices.back("wgrad", TENSOR, x=HANDED) == Cost(10 + 4.0 + 2.0, "table")
    assert prices.back("wgrad", TENSOR, ready=True, x=HANDED) == Cost(10 + 2.0, "table")
    alone = SitePrices(BARE, tune="never", table=_table(BARE))
    assert alone.fwd(TENSOR, handed=True) == Cost(10.5, "table")
    assert alone.gradient(None) is None


def test_what_two_readers_save_is_known_by_rows_only():
    both = FUSED.quantise("gy", (GY, GY))
    without = SitePrices(FUSED, tune="never", table=_table(FUSED))
    assert without.saved("gy", (GY, GY)).us == 0.0
    with_row = SitePrices(FUSED, tune="never", table=_table(FUSED, more={both: 5.5}))
    assert with_row.saved("gy", (GY, GY)).us == pytest.approx(3.0 + 4.0 - 5.5)
    dearer = SitePrices(FUSED, tune="never", table=_table(FUSED, more={both: 9.0}))
    assert dearer.saved("gy", (GY, GY)).us == 0.0


def test_without_kernels_alone_whole_directions_stand():
    rows = [
        CostRow(FUSED.key(d, kernel, handed), us, "2026-01-01")
        for d in DIRECTIONS
        for kernel, handed, us in ((HIGH_PRECISION, False, 9.0), (TENSOR, False, 6.0))
    ]
    rows.append(CostRow(FUSED.key("wgrad", TENSOR, True), 4.0, "2026-01-01"))
    prices = SitePrices(FUSED, tune="never", table=CostTable(None, rows))
    assert not prices.apart and prices.gradient(None) is None
    assert prices.fwd(TENSOR) == prices.alone("fwd", TENSOR) == Cost(6.0, "table")
    assert prices.back("wgrad", TENSOR, x=HANDED) == Cost(4.0, "table")
    assert prices.back("dgrad", TENSOR, ready=True) is None
    assert prices.saved("gy", (GY, GY)).us == 0.0


def test_high_precision_alone_does_not_push_whole_rows_aside():
    """A table that was filled in part: bare GEMMs in bf16, chains as a whole."""
    rows = [CostRow(FUSED.gemm(d, HIGH_PRECISION), 5.0, "2026-01-01") for d in DIRECTIONS]
    whole = [
        CostRow(FUSED.key(d, kernel), 9.0, "2026-01-01")
        for d in DIRECTIONS
        for kernel in (HIGH_PRECISION, TENSOR)
    ]
    assert not SitePrices(FUSED, tune="never", table=CostTable(None, rows + whole)).apart
    assert SitePrices(FUSED, tune="never", table=CostTable(None, rows)).apart
    fp8 = CostRow(FUSED.gemm("fwd", TENSOR), 3.0, "2026-01-01")
    assert SitePrices(FUSED, tune="never", table=CostTable(None, [*rows, *whole, fp8])).apart


def test_a_sum_is_as_good_as_its_worst_part():
    assert add([Cost(1.0, "table"), Cost(2.0, "estimated"), Cost(4.0, "measured")]) == Cost(
        7.0, "estimated"
    )
    assert add([Cost(1.0, "table"), None]) is None
    failed = Cost(None, "failed", "why")
    assert add([Cost(1.0, "table"), failed]) == failed
