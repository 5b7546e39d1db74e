"""The break-even batch in the words of the report."""

from __future__ import annotations

from dataclasses import replace

import torch

from loka_compile.lowering.cost_store import CostTable
from loka_compile.lowering.cost_table import CostRow
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.parts import Place
from loka_compile.lowering.parts import rules_of
from loka_compile.lowering.pays_from import PaysFrom
from loka_compile.lowering.pays_from import parts_of
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
    found = with_break_even(chosen, PLACE, Options(), PaysFrom(LINES))
    assert found["fwd"].reason == "FP8 pays from M = 474"
    assert found["dgrad"] == chosen["dgrad"]
    refused = {"fwd": Choice(us=5.0, reason="torch:rowwise: speedup 0.80 < 1.05")}
    found = with_break_even(refused, PLACE, Options(), PaysFrom(LINES))
    assert found["fwd"].reason == "torch:rowwise: speedup 0.80 < 1.05; FP8 pays from M = 474"


def test_parts_are_summed_and_a_weight_does_not_grow():
    """GEMMs 2 + m/200 against 3 + m/100; quantising 1 + rows/1000."""
    fp8, rule = "torch:rowwise", rules_of("torch:rowwise", "fwd")
    rows = []
    for m in (128, 1024):
        at = replace(PLACE, shape=GemmShape(m, 256, 512))
        rows += [
            CostRow(at.gemm("fwd", fp8), 2 + m / 200, "2026-01-01"),
            CostRow(at.gemm("fwd", HIGH_PRECISION), 3 + m / 100, "2026-01-01"),
            CostRow(at.quantise("x", (rule[0], None)), 1 + m / 1000, "2026-01-01"),
        ]
    # The weight has 512 rows: 4.512 + 6 m / 1000 against 3 + 10 m / 1000.
    assert say("fwd", fp8, PLACE, 1.0, CostTable(None, rows)) == "FP8 pays from M = 378"


def test_a_chain_counts_half_its_gradient_in_each_direction():
    chained = replace(PLACE, epilogue="block_norm:256:hard_swish")
    fp8 = "torch:tensorwise"
    rules = (rules_of(fp8, "dgrad")[0], rules_of(fp8, "wgrad")[0])
    alone = [key for key, _, _ in parts_of("dgrad", fp8, chained, None)]
    ready = parts_of("dgrad", fp8, chained, rules)
    assert [key.direction for key in alone] == ["dgrad", "quantise", "quantise", "gradient"]
    assert [key.direction for key, _, _ in ready] == ["dgrad", "quantise", "gradient"]
    assert [(share, grows) for _, share, grows in ready] == [(1.0, True), (1.0, False), (0.5, True)]
    assert ready[-1][0].library == "loka" and alone[-1].recipe == HIGH_PRECISION
