"""Parts of a step: their keys, what is timed for them, and their price without rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loka_compile.lowering import measure
from loka_compile.lowering.cost_store import CostTable
from loka_compile.lowering.cost_table import CostRow
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.measure import part_price
from loka_compile.lowering.part_workloads import kernel_alone
from loka_compile.lowering.part_workloads import moving
from loka_compile.lowering.parts import HANDED
from loka_compile.lowering.parts import MEMORY_BOUND
from loka_compile.lowering.parts import QUANTISE
from loka_compile.lowering.parts import WIDENED
from loka_compile.lowering.parts import Place
from loka_compile.lowering.parts import backward_parts
from loka_compile.lowering.parts import forward_parts
from loka_compile.lowering.parts import guess_us
from loka_compile.lowering.parts import is_gemm
from loka_compile.lowering.parts import out_of
from loka_compile.lowering.parts import parse_pair
from loka_compile.lowering.parts import rules_of
from loka_compile.lowering.parts import spell_pair
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.workloads import ready_to_time
from loka_compile.lowering.workloads import workload

CPU = torch.device("cpu")
CHAIN = "block_norm:32:hard_swish+gain"
BARE = Place(GemmShape(48, 64, 96), torch.bfloat16, CPU)
FUSED = replace(BARE, epilogue=CHAIN)
BACK = ("dgrad", "wgrad")
KERNEL = "bf16:plain"


def test_pairs_of_rules_are_spelled_both_ways():
    for kernel in (
        "torch:tensorwise",
        "torch:rowwise",
        "torch:blockwise",
        "bf16:plain",
        HIGH_PRECISION,
    ):
        for direction in ("fwd", *BACK):
            pair = rules_of(kernel, direction)
            assert parse_pair(spell_pair(pair)) == pair
    assert spell_pair(rules_of("torch:tensorwise", "dgrad")) == "tensor.e5m2-tensor.e4m3"
    for wrong in ("tensor.e4m3", "row.e3m4-none", "none-none-none"):
        with pytest.raises(ValueError, match="rule"):
            parse_pair(wrong)


def _said(keys) -> list[str]:
    return [
        key.direction + (f" {key.recipe}" if key.direction == "quantise" else "") for key in keys
    ]


def test_what_directions_are_made_of():
    row, tensor = "torch:rowwise", "torch:tensorwise"
    assert _said(forward_parts(FUSED, HIGH_PRECISION)) == ["fwd", "epilogue"]
    assert _said(forward_parts(BARE, row)) == [
        "fwd", "quantise row.e4m3-none", "quantise row.e4m3-none",
    ]  # fmt: skip
    # Our own kernel has its epilogue inside; a handed input is quantised already.
    assert _said(forward_parts(FUSED, "loka:rowwise", handed=True)) == [
        "fwd", "quantise row.e4m3-none",
    ]  # fmt: skip
    assert _said(backward_parts(BARE, "dgrad", tensor)) == [
        "dgrad", "quantise tensor.e5m2-none", "quantise none-tensor.e4m3",
    ]  # fmt: skip
    assert _said(backward_parts(BARE, "dgrad", tensor, ready=True)) == [
        "dgrad", "quantise none-tensor.e4m3",
    ]  # fmt: skip
    assert _said(backward_parts(BARE, "wgrad", row, ready=True, x=HANDED)) == ["wgrad"]
    assert _said(backward_parts(BARE, "wgrad", HIGH_PRECISION, x=WIDENED)) == ["wgrad", "widen"]


def test_keys_tell_apart_what_costs_differently():
    w, x, gy = (BARE.quantise(t, rules_of("torch:rowwise", "fwd")) for t in ("w", "x", "gy"))
    assert [(k.m, k.k) for k in (w, x, gy)] == [(96, 64), (48, 64), (48, 96)]
    turned = replace(BARE, layout="kn").quantise("w", (rules_of("torch:rowwise", "fwd")[0], None))
    assert (turned.m, turned.k, turned.recipe) == (64, 96, "none-row.e4m3")
    # A weight for both readers is one kernel of ours; an exact epilogue has no gradient of its own.
    assert BARE.quantise("w", (rules_of("torch:rowwise", "fwd")[1],) * 2).library == "loka"
    exact = replace(BARE, epilogue="pointwise:relu+bias")
    assert not exact.has_gradient and FUSED.has_gradient and not BARE.has_gradient
    added = replace(BARE, epilogue=CHAIN + "+add")
    assert added.has_gradient and FUSED.own_gradient and not added.own_gradient
    outs = {FUSED.gemm("fwd", "loka:rowwise", out) for out in ("y", "y8", "y8t")}
    assert len({k.family() for k in outs}) == 3
    assert all(is_gemm(k) and out_of(k)[1] == CHAIN for k in outs)
    bare = FUSED.gemm("fwd", "torch:rowwise")
    assert bare == BARE.gemm("fwd", "torch:rowwise") and out_of(bare) == ("", "")
    assert FUSED.key("fwd", "torch:rowwise").family() != bare.family()


def _every_key():
    yield from (FUSED.gemm("fwd", "loka:tensorwise", out) for out in ("y", "y8", "y8t"))
    for kernel in (HIGH_PRECISION, "torch:tensorwise"):
        yield from forward_parts(FUSED, kernel)
        for direction in BACK:
            yield from backward_parts(FUSED, direction, kernel, x=WIDENED)
    yield FUSED.quantise("gy", (rules_of("torch:rowwise", "dgrad")[0],) * 2)
    yield FUSED.quantise("w", (rules_of("torch:tensorwise", "fwd")[1],) * 2)
    for epilogue in ("pointwise:relu+bias", "pointwise:none+bias+mul+add", "pointwise:silu+scale"):
        exact = replace(BARE, epilogue=epilogue)
        yield from forward_parts(exact, HIGH_PRECISION)
        yield exact.gemm("fwd", "loka:rowwise")
    added = replace(BARE, epilogue=CHAIN + "+add")
    yield from (added.gemm("fwd", "loka:tensorwise"), added.epilogue_step())
    yield BARE.bounded(turned=True)
    yield FUSED.gradient(None)
    first, second = (rules_of(k, "dgrad")[0] for k in ("torch:rowwise", "torch:tensorwise"))
    yield FUSED.gradient((first, second))


@pytest.mark.parametrize("key", dict.fromkeys(_every_key()), ids=str)
def test_what_is_timed_runs(key):
    function, operands = workload(key, torch.bfloat16, CPU)
    made = function(*operands)
    tensors = made if isinstance(made, tuple) else (made,)
    assert all(torch.isfinite(t.float()).all() for t in tensors)
    if is_gemm(key):
        sizes = {"fwd": (48, 96), "dgrad": (48, 64), "wgrad": (96, 64)}
        assert tensors[0].shape == sizes[key.direction]
    if key.direction == "gradient" and key.recipe != HIGH_PRECISION:
        q, scale, qt, scale_t, ggain = tensors
        assert q.dtype == torch.float8_e4m3fn and qt.dtype == torch.float8_e5m2
        assert (q.shape, qt.shape, ggain.shape) == ((48, 96), (96, 48), (96,))
        assert scale.shape == (48, 1) and scale_t.shape == ()
    if is_gemm(key):
        # Kernels alone are not compiled.
        assert ready_to_time(key, torch.bfloat16, CPU)[0].__module__.startswith("loka_compile")


def test_guesses_grow_with_the_bytes():
    for key in dict.fromkeys(_every_key()):
        if key.direction in MEMORY_BOUND:
            assert 1.0 < guess_us(key, 2) < guess_us(replace(key, m=64 * key.m), 2)
    # Without the transpose it is written by the norm's own kernel.
    assert guess_us(BARE.bounded(turned=False), 2) < 1.0 < guess_us(BARE.bounded(turned=True), 2)
    both = FUSED.quantise("x", (rules_of("torch:tensorwise", "fwd")[0],) * 2)
    one = FUSED.quantise("x", (rules_of("torch:tensorwise", "fwd")[0], None))
    assert guess_us(one, 2) < guess_us(both, 2) < 2 * guess_us(one, 2)


def test_what_moves_memory_always_has_a_price(monkeypatch):
    """Table, then a fit, then (on a GPU) a time, then a guess; a kernel has no guess."""
    table = CostTable(None, [])

    def cost(key, tune="never", device=CPU, held=table):
        return part_price(key, torch.bfloat16, device, tune=tune, table=held)

    key = BARE.widen()
    assert cost(BARE.gemm("fwd", HIGH_PRECISION)) is None
    guessed = cost(key)
    assert guessed is not None and guessed.us == guess_us(key, 2)
    timed = []
    monkeypatch.setattr(measure, "time_us", lambda *a: timed.append(a) or 3.0)
    cuda = torch.device("cuda")
    found = cost(key, "auto", cuda)
    assert found is not None and (found.us, found.source) == (3.0, "measured")
    # Quantising would have to be compiled, rule by rule: its bytes stand for it.
    x = cost(BARE.quantise("x", (rules_of("torch:rowwise", "fwd")[0], None)), "auto", cuda)
    assert x is not None and x.source == "estimated" and len(timed) == 1
    rows = [CostRow(replace(key, m=m), 1 + m / 100, "2026-01-01") for m in (16, 64, 256, 1024)]
    rows += [CostRow(replace(key, k=k), 1 + k / 100, "2026-01-01") for k in (256, 1024)]
    fitted = cost(key, "auto", cuda, CostTable(None, rows))
    assert fitted is not None and fitted.source == "estimated" and len(timed) == 1


def test_what_cannot_be_timed_is_guessed(monkeypatch):
    def broken(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(measure, "time_us", broken)
    monkeypatch.setattr(measure, "_FAILED", {})
    place, cuda = replace(BARE, shape=GemmShape(80, 64, 96)), torch.device("cuda")
    table = CostTable(None, [])
    moved = part_price(place.widen(), torch.bfloat16, cuda, tune="auto", table=table)
    assert moved is not None and moved.source == "estimated"
    kernel = place.gemm("fwd", "torch:rowwise")
    failed = part_price(kernel, torch.bfloat16, cuda, tune="auto", table=table)
    assert failed is not None and (failed.us, failed.note) == (None, "RuntimeError: no compiler")


@pytest.mark.parametrize("direction", ["fwd", *BACK])
def test_a_cast_to_bf16_is_a_part_like_quantising(direction):
    """Of the same parts, each of which can be timed; nothing of ours casts a weight for both."""
    place = replace(BARE, dtype=torch.float32)
    forward = direction == "fwd"
    keys = forward_parts(place, KERNEL) if forward else backward_parts(place, direction, KERNEL)
    casts = [key for key in keys if key.direction == QUANTISE]
    assert len(keys) == 3 and len(casts) == 2 and all(guess_us(key, 4) > 0 for key in casts)
    for key in casts:
        function, operands = moving(key, torch.float32, CPU)
        assert function(*operands)[0].dtype == torch.bfloat16
    rule = rules_of(KERNEL, "fwd")[1]
    assert place.quantise("w", (rule, rule)).library == "torch"
    (gemm,) = (key for key in keys if key.direction != QUANTISE)
    function, operands = kernel_alone(gemm, torch.float32, CPU)
    assert function(*operands).dtype == torch.float32
