"""A part counts at least what the host needs to start it, unless CUDA graphs replay it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loka_compile.lowering.cost_store import CostTable
from loka_compile.lowering.cost_table import CostRow
from loka_compile.lowering.host_costs import HostCosts
from loka_compile.lowering.host_costs import host_costs
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.parts import Place
from loka_compile.lowering.parts import rules_of
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


@pytest.mark.parametrize("big", [False, True])
def test_fp8_has_to_pay_for_its_launches(big: bool):
    def us(kernel, host):
        cost = SitePrices(BARE, tune="never", table=_table(big), host=host).fwd(kernel)
        assert cost is not None and cost.us is not None
        return cost.us

    assert us(TENSOR, None) < us(HIGH_PRECISION, None)
    assert (us(TENSOR, HOST) < us(HIGH_PRECISION, HOST)) == big


def test_nobody_asks_where_the_host_does_not_matter():
    assert host_costs(CPU, None) is None
    assert host_costs(torch.device("cuda"), "reduce-overhead") is None


@pytest.mark.gpu
def test_measured():
    costs = host_costs(torch.device("cuda", 0), None)
    assert costs is not None
    assert 0 < costs.launch < 1e3 and 0 < costs.call < 1e3
    assert costs.own > costs.launch
