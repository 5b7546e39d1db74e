"""The break-even batch in the words of the report."""

from __future__ import annotations

import torch

from loka_compile.lowering.cost_store import CostTable
from loka_compile.lowering.cost_table import CostRow
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.parts import Place
from loka_compile.lowering.pays_from import say
from loka_compile.lowering.pays_from import with_break_even
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.options import Options
from loka_compile.plan import Choice

PLACE = Place(GemmShape(1024, 256, 512), torch.bfloat16, torch.device("cpu"))


def _table(fast: dict[int, float], slow: dict[int, float]) -> CostTable:
    rows = []
    for kernel, points in (("torch:rowwise", fast), (HIGH_PRECISION, slow)):
        for m, us in points.items():
            place = Place(GemmShape(m, 256, 512), torch.bfloat16, torch.device("cpu"))
            rows.append(CostRow(place.key("fwd", kernel), us, "2026-01-01"))
    return CostTable(None, rows)


LINES = _table({128: 5.64, 1024: 10.12}, {128: 4.28, 1024: 13.24})


def test_rows_are_solved_for_the_batch():
    # 5 + m/200 against 3 + m/100.
    assert say("fwd", "torch:rowwise", PLACE, 1.0, LINES) == "FP8 pays from M = 400"
    assert say("fwd", "torch:rowwise", PLACE, 1.05, LINES) == "FP8 pays from M = 474"
    one = _table({128: 3.0}, {128: 4.0, 1024: 9.0})
    assert say("fwd", "torch:rowwise", PLACE, 1.0, one) == ""
    never = _table({128: 6.0, 1024: 20.0}, {128: 4.0, 1024: 9.0})
    assert say("fwd", "torch:rowwise", PLACE, 1.0, never) == "FP8 pays at no M"
    always = _table({128: 2.0, 1024: 3.0}, {128: 4.0, 1024: 9.0})
    assert say("fwd", "torch:rowwise", PLACE, 1.0, always) == "FP8 pays at every M"


def test_chosen_and_refused_kernels_say_it():
    chosen = {
        "fwd": Choice("torch:rowwise", us=10.12, source="table"),
        "dgrad": Choice(reason="a head stays in high precision"),
    }
    found = with_break_even(chosen, PLACE, Options(), LINES)
    assert found["fwd"].reason == "FP8 pays from M = 474"
    assert found["dgrad"] == chosen["dgrad"]
    refused = {"fwd": Choice(us=5.0, reason="torch:rowwise: speedup 0.80 < 1.05")}
    found = with_break_even(refused, PLACE, Options(), LINES)
    assert found["fwd"].reason == "torch:rowwise: speedup 0.80 < 1.05; FP8 pays from M = 474"
