"""Prices: from the table, timed on a GPU, estimated; and what is timed runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loka_compile import _compat
from loka_compile.lowering import measure
from loka_compile.lowering.cost_store import CostTable
from loka_compile.lowering.cost_store import Store
from loka_compile.lowering.cost_table import CostRow
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.measure import latency_us
from loka_compile.lowering.measure import price
from loka_compile.lowering.parts import Place
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.workloads import compiled_workload
from loka_compile.lowering.workloads import workload

CPU = torch.device("cpu")
# Small, so that compiling and not running takes the time; K and N differ.
SHAPE = GemmShape(200, 512, 1024)
PLACE = Place(SHAPE, torch.bfloat16, CPU)


@pytest.fixture
def table(tmp_path):
    return CostTable(Store(tmp_path / "costs.sqlite"))


@pytest.mark.parametrize("kernel", [HIGH_PRECISION, "torch:rowwise"])
@pytest.mark.parametrize("tune", ["auto", "never"])
def test_a_cpu_has_nothing_to_time(kernel, tune, table):
    assert price("fwd", kernel, PLACE, tune=tune, table=table) is None
    assert latency_us("fwd", kernel, SHAPE, torch.bfloat16, CPU) is None


@pytest.mark.parametrize("tune", ["auto", "never"])
def test_a_row_of_the_bucket_answers(tune, table):
    table.put([CostRow(PLACE.key("fwd", "torch:rowwise"), 7.0, "2026-01-01")])
    near = replace(PLACE, shape=GemmShape(224, 512, 1024))
    for place in (PLACE, near):
        cost = price("fwd", "torch:rowwise", place, tune=tune, table=table)
        assert cost is not None and (cost.us, cost.source) == (7.0, "table")
    far = replace(PLACE, shape=GemmShape(225, 512, 1024))
    for place in (far, replace(PLACE, layout="kn"), replace(PLACE, dtype=torch.float32)):
        assert price("fwd", "torch:rowwise", place, tune=tune, table=table) is None


def test_every_direction_is_priced_with_its_part_of_the_chain():
    fused = replace(PLACE, epilogue="block_norm:256:hard_swish")
    for direction in ("fwd", "dgrad", "wgrad"):
        assert fused.key(direction, "torch:rowwise").epilogue == "block_norm:256:hard_swish"
        assert PLACE.key(direction, "torch:rowwise").epilogue == ""


@pytest.mark.parametrize("kernel", [HIGH_PRECISION, "torch:tensorwise", "torchao:rowwise"])
@pytest.mark.parametrize("direction", ["dgrad", "wgrad"])
def test_workloads_of_a_fused_backward_run(direction, kernel):
    """The gradient of the epilogue, then the GEMM on what it left."""
    place = replace(PLACE, shape=GemmShape(32, 64, 96), epilogue="block_norm:32:hard_swish+gain")
    handed = kernel != HIGH_PRECISION and direction == "wgrad"
    key = place.key(direction, kernel, handed)
    function, arguments = workload(key, torch.bfloat16, CPU)
    result, ggain = function(*arguments)
    assert result.shape == ((32, 64) if direction == "dgrad" else (96, 64))
    assert ggain.shape == (96,)


def test_a_kernel_that_fails_is_timed_once(table, monkeypatch):
    calls = []

    def broken(*_):
        calls.append(1)
        raise RuntimeError("no workspace\nand more")

    monkeypatch.setattr(measure, "time_us", broken)
    monkeypatch.setattr(measure, "_FAILED", {})
    monkeypatch.setattr(_compat, "device_key", lambda device: "fake GPU")
    place = replace(PLACE, device=torch.device("cuda"))
    for _ in range(2):
        cost = price("fwd", "torch:rowwise", place, tune="auto", table=table)
        assert cost is not None and cost.us is None
        assert (cost.source, cost.note) == ("failed", "RuntimeError: no workspace")
    assert len(calls) == 1 and table.rows() == []
    monkeypatch.setattr(measure, "time_us", lambda *_: 3.0)
    first = price("dgrad", "torch:rowwise", place, tune="auto", table=table)
    assert first is not None and first.source == "measured"
    again = price("dgrad", "torch:rowwise", place, tune="auto", table=table)
    assert again is not None and (again.us, again.source) == (3.0, "table")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kernel", [HIGH_PRECISION, "torch:rowwise+emulated"])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_what_is_timed_computes_the_gemm(direction, kernel, layout):
    key = replace(PLACE, layout=layout).key(direction, kernel)
    function, operands = workload(key, torch.bfloat16, CPU)
    wanted = {"fwd": (224, 1024), "dgrad": (224, 512), "wgrad": (1024, 512)}[direction]
    assert function(*operands).shape == wanted


@pytest.mark.parametrize("handed", [False, True])
@pytest.mark.parametrize("epilogue", ["block_norm:256:hard_swish+gain", "block_norm:256:none"])
def test_what_is_timed_covers_the_chain(epilogue, handed):
    key = replace(PLACE, epilogue=epilogue).key("fwd", HIGH_PRECISION, handed)
    function, operands = workload(key, torch.bfloat16, CPU)
    y, u, r = function(*operands)
    assert y.shape == u.shape == (224, 1024) and r.shape == (224, 4)


def test_an_exact_epilogue_leaves_other_rows_in_force(table):
    """Only our own kernel takes it in: the others' bare rows hold, and its pass comes on top."""
    place = replace(PLACE, epilogue="pointwise:relu+bias")
    for kernel in (HIGH_PRECISION, "torch:rowwise"):
        assert price("fwd", kernel, place, tune="never", table=table) is None
        table.put([CostRow(PLACE.key("fwd", kernel), 7.0, "2026-01-01")])
        cost = price("fwd", kernel, place, tune="never", table=table)
        assert cost is not None and cost.source == "table" and 7.0 < cost.us < 20.0
        table.put([CostRow(PLACE.key("dgrad", kernel), 5.0, "2026-01-01")])
        back = price("dgrad", kernel, place, tune="never", table=table)
        assert back is not None and (back.us, back.source) == (5.0, "table")
    assert price("fwd", "loka:tensorwise", place, tune="never", table=table) is None
    table.put([CostRow(place.key("fwd", "loka:tensorwise"), 6.0, "2026-01-01")])
    own = price("fwd", "loka:tensorwise", place, tune="never", table=table)
    assert own is not None and (own.us, own.source) == (6.0, "table")


@pytest.mark.parametrize("handed", [False, True])
@pytest.mark.parametrize("epilogue", ["pointwise:silu+bias", "pointwise:none+bias+mul+add"])
def test_what_is_timed_covers_an_exact_epilogue(epilogue, handed):
    key = replace(PLACE, epilogue=epilogue).key("fwd", "loka:tensorwise", handed)
    function, operands = workload(key, torch.bfloat16, CPU)
    y, t = function(*operands)
    assert y.shape == t.shape == (224, 1024)


@pytest.mark.slow
def test_what_is_timed_compiles():
    key = replace(PLACE, epilogue="block_norm:256:hard_swish").key("fwd", HIGH_PRECISION)
    compiled, operands = compiled_workload(key, torch.bfloat16, CPU)
    function, _ = workload(key, torch.bfloat16, CPU)
    for got, want in zip(compiled(*operands), function(*operands), strict=True):
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gpu_times_are_positive_and_kept(direction, table):
    device = torch.device("cuda")
    why = _compat.why_no_fp8(device)
    kernels = [HIGH_PRECISION] + ([] if why else ["torch:rowwise", "torch:tensorwise"])
    place = replace(PLACE, device=device, epilogue="block_norm:256:hard_swish")
    for kernel in kernels:
        first = price(direction, kernel, place, tune="auto", table=table)
        assert first is not None and first.us is not None, first
        assert 0 < first.us < 10_000 and first.source == "measured"
        again = price(direction, kernel, place, tune="auto", table=table)
        assert again is not None and (again.us, again.source) == (first.us, "table")


@pytest.mark.gpu
@pytest.mark.slow
def test_gpu_times_grow_with_the_work(table):
    device = torch.device("cuda")
    small, large = (
        price("fwd", HIGH_PRECISION, Place(s, torch.bfloat16, device), tune="auto", table=table)
        for s in (SHAPE, GemmShape(32768, 4096, 4096))
    )
    assert small is not None and large is not None and large.us > 10 * small.us
