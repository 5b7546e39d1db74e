"""What the host needs to start the parts of a step counts, unless CUDA graphs replay it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loka_compile.lowering.balance import balanced
from loka_compile.lowering.cost_store import CostTable
from loka_compile.lowering.cost_table import CostRow
from loka_compile.lowering.entries import Kernel
from loka_compile.lowering.host_costs import HostCosts
from loka_compile.lowering.host_costs import host_costs
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.parts import Place
from loka_compile.lowering.parts import rules_of
from loka_compile.lowering.programme import Programme
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.site_prices import SitePrices

CPU = torch.device("cpu")
BARE = Place(GemmShape(64, 128, 256), torch.bfloat16, CPU)
FUSED = replace(BARE, epilogue="block_norm:256:hard_swish")
TENSOR, ROW = "torch:tensorwise", "torch:rowwise"
HOST = HostCosts(launch=10.0, call=20.0, scaled=40.0, own=50.0)


def test_what_parts_start():
    a, b = rules_of(TENSOR, "fwd")
    gy = rules_of(TENSOR, "dgrad")[0]
    row = rules_of(ROW, "fwd")[0]
    assert HOST.us(BARE.gemm("fwd", HIGH_PRECISION)) == 20
    assert HOST.us(BARE.gemm("wgrad", TENSOR)) == 40
    assert HOST.us(BARE.gemm("fwd", "torchao:rowwise")) == 40
    assert HOST.us(BARE.gemm("fwd", "bf16:plain")) == 20
    assert HOST.us(BARE.gemm("fwd", "fbgemm:rowwise")) == 50
    assert HOST.us(FUSED.gemm("fwd", "loka:tensorwise")) == 50
    assert HOST.us(BARE.quantise("x", (a, None))) == 30
    assert HOST.us(BARE.quantise("x", (a, b))) == 60
    assert HOST.us(BARE.quantise("x", (row, None))) == 20
    # One op of ours writes both orientations of all weights.
    assert HOST.us(BARE.quantise("w", (b, b))) == 10
    assert HOST.us(FUSED.epilogue_step()) == 20
    assert HOST.us(FUSED.gradient(None)) == 30
    assert HOST.us(FUSED.gradient((gy, gy))) == 50
    assert HOST.us(BARE.widen()) == 10


def _table(big: bool) -> CostTable:
    scale = 100.0 if big else 1.0
    a, b = rules_of(TENSOR, "fwd")
    keys = {BARE.gemm(d, HIGH_PRECISION): 4.0 * scale for d in DIRECTIONS}
    keys |= {BARE.gemm(d, TENSOR): 2.0 * scale for d in DIRECTIONS}
    keys |= {BARE.quantise("x", (a, None)): 0.5 * scale, BARE.quantise("w", (b, None)): 0.2 * scale}
    return CostTable(None, [CostRow(k, us, "2026-01-01") for k, us in keys.items()])


def test_prices_say_what_the_host_needs():
    prices = SitePrices(BARE, tune="never", table=_table(False), host=HOST)
    high, low = prices.fwd(HIGH_PRECISION), prices.fwd(TENSOR)
    assert (high.us, high.host) == (4.0, 20.0)
    # A product of FP8 operands, and what quantises them.
    assert (low.us, low.host) == (pytest.approx(2.7), 40.0 + 30.0 + 30.0)
    assert SitePrices(BARE, tune="never", table=_table(False)).fwd(TENSOR).host == 0.0


@pytest.mark.parametrize("big", [False, True])
def test_fp8_has_to_pay_for_its_launches_where_the_step_waits_for_them(big: bool):
    def chosen(host):
        prices = SitePrices(BARE, tune="never", table=_table(big), host=host)
        kernels = {"fwd": [Kernel(HIGH_PRECISION), Kernel(TENSOR)]}
        kernels |= {d: [Kernel(HIGH_PRECISION)] for d in ("dgrad", "wgrad")}

        def solve(share):
            programme = Programme(1.05, share)
            programme.add("site", kernels, prices)
            return programme.solve()

        def totals(found):
            return sum(o.us for o in found.values()), sum(o.host for o in found.values())

        return balanced(solve, totals)["site", "fwd"].kernel

    assert chosen(None) == TENSOR
    assert chosen(HOST) == (TENSOR if big else HIGH_PRECISION)


def test_nobody_asks_where_the_host_does_not_matter():
    assert host_costs(CPU) is None
    assert host_costs(torch.device("cuda"), replayed=True) is None


@pytest.mark.gpu
def test_measured():
    costs = host_costs(torch.device("cuda", 0))
    assert costs is not None
    assert 0 < costs.launch < 1e3 and 0 < costs.call < 1e3
    assert costs.own > costs.launch
