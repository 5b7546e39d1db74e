"""What is timed for a set of places: each part once, and only what has no row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loka_compile.lowering import fill as filling
from loka_compile.lowering import measure
from loka_compile.lowering.cost_store import CostTable
from loka_compile.lowering.cost_store import Store
from loka_compile.lowering.cost_table import CostRow
from loka_compile.lowering.fill import fill
from loka_compile.lowering.fill import wanted_at
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.parts import MEMORY_BOUND
from loka_compile.lowering.parts import Place
from loka_compile.options import Options

CPU = torch.device("cpu")
CHAIN = "block_norm:160:hard_swish"
PLACE = Place(GemmShape(64, 320, 640, CHAIN), torch.bfloat16, CPU, epilogue=CHAIN)
ALL = Options(emulate=True, libraries=("loka", "torch"))


def test_every_part_is_wanted_once():
    bare = replace(PLACE, shape=GemmShape(64, 320, 640), epilogue="")
    both = wanted_at([PLACE, bare, PLACE], ALL)
    assert len(both) == len(set(both))
    gemms = [key for key, _ in both if key.direction not in MEMORY_BOUND]
    # The bare place adds nothing but what the chain has already, our own kernel aside.
    assert {k for k, _ in wanted_at([bare], ALL) if k in gemms} < set(gemms)
    outs = {k.epilogue.partition("+")[0] for k in gemms if k.library == "loka"}
    assert outs == {"gemm>y", "gemm>y8", "gemm>y8t"}
    # Memory is timed at sizes that stand for all, at widths that the chain's blocks divide.
    sizes = {(k.m, k.n) for k, _ in both if k.direction == "gradient"}
    assert len(sizes) == len(filling.MEMORY_SIZES)
    assert all(n % 160 == 0 for _, n in sizes)


@pytest.mark.parametrize(
    ("epilogue", "outs"),
    [
        ("block_norm:160:hard_sigmoid+gate", {"gemm>y"}),
        ("block_norm:160:none", {"gemm>y", "gemm>y8", "gemm>y8t"}),
    ],
)
def test_only_what_is_bounded_is_handed_over(epilogue, outs):
    shape = replace(PLACE.shape, epilogue=epilogue)
    wanted = wanted_at([replace(PLACE, shape=shape, epilogue=epilogue)], ALL)
    assert {
        k.epilogue.partition("+")[0] for k, _ in wanted if k.epilogue.startswith("gemm>")
    } == outs


def test_a_stopped_run_goes_on(tmp_path, monkeypatch):
    table = CostTable(Store(tmp_path / "costs.sqlite"))
    wanted = wanted_at([PLACE], ALL)[:6]
    table.put([CostRow(wanted[0][0], 1.0, "2026-01-01")])
    timed = []

    def time_us(key, *_):
        if key == wanted[2][0]:
            raise RuntimeError("no such kernel here")
        timed.append(key)
        return 2.0

    monkeypatch.setattr(measure, "time_us", time_us)
    monkeypatch.setattr(measure, "_FAILED", {})
    told = []
    assert not fill(wanted, CPU, table, -1.0, lambda key, cost: told.append((key, cost)))
    # What had a row is told before the time is looked at; nothing was timed.
    assert told == [(wanted[0][0], None)] and not timed
    assert fill(wanted, CPU, table, 60.0)
    assert timed == [wanted[i][0] for i in (1, 3, 4, 5)]
    assert fill(wanted, CPU, table, 60.0) and len(timed) == 4
