"""The GEMM benchmark's JSON as cost rows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from loka_compile.errors import CostTableError
from loka_compile.lowering.cost_import import rows_of_backward
from loka_compile.lowering.cost_import import rows_of_benchmark
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.parts import Place
from loka_compile.lowering.parts import is_gemm
from loka_compile.lowering.parts import rules_of
from loka_compile.lowering.recipes import HIGH_PRECISION

ENV = {"torch": "2.11.0", "torchao": "0.18.0", "device": "NVIDIA H200 sm90", "date": "2026-11-30"}


def _row(library: str, recipe: str, us: float | None, m: int = 1024, **more):
    base = {"library": library, "recipe": recipe, "direction": "fwd", "M": m, "K": 256, "N": 512}
    times = {"gemm_us": us and us / 2, "total_us": us, "rel_error": 0.04}
    return {**base, **times, "available": us is not None, "reason": "", **more}


def test_rows_take_total_time_and_versions(tmp_path):
    path = tmp_path / "gemm.json"
    rows = [
        _row("torchao", "rowwise", 8.0),
        _row("torch", "bf16", 9.0),
        _row("torch", "tf32", 12.0),
        _row("fbgemm", "rowwise", None, reason="not installed"),
    ]
    path.write_text(json.dumps({"env": ENV, "rows": rows}))
    ao, bf16, tf32 = rows_of_benchmark(path)
    assert (ao.us, ao.key.kernel, ao.key.version, ao.key.dtype) == (
        8.0, "torchao:rowwise", "0.18.0", "bfloat16",
    )  # fmt: skip
    assert (bf16.key.kernel, bf16.key.dtype, bf16.key.version) == (
        HIGH_PRECISION, "bfloat16", "2.11.0",
    )  # fmt: skip
    assert tf32.key.dtype == "tf32" and tf32.date == "2026-11-30"


def test_the_size_nearest_to_the_bucket_stands_for_it(tmp_path):
    path = tmp_path / "gemm.json"
    rows = [_row("torch", "rowwise", 7.0, 1000), _row("torch", "rowwise", 8.0, 1024)]
    for order in (rows, rows[::-1]):
        path.write_text(json.dumps({"env": ENV, "rows": order}))
        assert [r.us for r in rows_of_benchmark(path)] == [8.0]


def test_kernels_alone_are_keys_of_their_own(tmp_path):
    path = tmp_path / "gemm.json"
    without = {k: v for k, v in _row("torch", "rowwise", 7.0, 512).items() if k != "gemm_us"}
    path.write_text(json.dumps({"env": ENV, "rows": [_row("torch", "rowwise", 8.0), without]}))
    (alone,) = rows_of_benchmark(path, kernels_alone=True)
    assert alone.us == 4.0 and is_gemm(alone.key)
    assert alone.key not in {r.key for r in rows_of_benchmark(path)}


def test_gradients_of_a_chain_by_our_kernel(tmp_path):
    path = tmp_path / "backward.json"
    row = {"M": 4096, "N": 512, "block": 256, "fused_us": 9.0, "fused_rows_us": 12.0}
    path.write_text(json.dumps({"env": {**ENV, "own": "0.1.0+ab"}, "rows": [row]}))
    tensor, rows = rows_of_backward(path)
    assert (tensor.us, rows.us) == (9.0, 12.0)
    place = Place(
        GemmShape(4096, 64, 512), torch.bfloat16, torch.device("cpu"),
        epilogue="block_norm:256:hard_swish",
    )  # fmt: skip
    for one, kernel in ((tensor, "torch:tensorwise"), (rows, "torch:rowwise")):
        pair = (rules_of(kernel, "dgrad")[0], rules_of(kernel, "wgrad")[0])
        want = place.gradient(pair)
        # What a plan asks for, on that device with those versions.
        given = {f: getattr(one.key, f) for f in ("device", "version", "torch")}
        assert one.key == replace(want, **given)
        assert one.key.version == "0.1.0+ab"


@pytest.mark.parametrize("text", ["{", '{"rows": []}', '{"env": {}, "rows": [1]}'])
def test_another_file_is_no_backward(tmp_path, text):
    path = tmp_path / "backward.json"
    path.write_text(text)
    with pytest.raises(CostTableError, match="no benchmark of the backward"):
        rows_of_backward(path)


@pytest.mark.parametrize("text", ["{", '{"rows": []}', '{"env": {}, "rows": [1]}'])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "gemm.json"
    path.write_text(text)
    with pytest.raises(CostTableError, match="no benchmark of GEMMs"):
        rows_of_benchmark(path)
