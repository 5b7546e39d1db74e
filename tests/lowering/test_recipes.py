"""The recipes as data: what each direction scales and how."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from loka_compile.lowering import recipes as r


def test_directions_are_looked_up_by_name():
    for recipe in (r.TENSORWISE, r.ROWWISE, r.ROWWISE_WITH_GW_HP):
        assert [recipe.gemm(d) for d in r.DIRECTIONS] == [recipe.fwd, recipe.dgrad, recipe.wgrad]
    with pytest.raises(KeyError):
        r.ROWWISE.gemm("forward")


def test_granularity():
    for d in r.DIRECTIONS:
        assert not r.TENSORWISE.gemm(d).a.rows and not r.TENSORWISE.gemm(d).b.rows
        assert r.ROWWISE.gemm(d).a.rows and r.ROWWISE.gemm(d).b.rows
        # Activations and gradients by groups, the weight, where there is one, by blocks.
        assert r.BLOCKWISE.gemm(d).a.granularity is r.Granularity.GROUP
        weight = r.Granularity.GROUP if d == "wgrad" else r.Granularity.BLOCK
        assert r.BLOCKWISE.gemm(d).b.granularity is weight
        assert r.GROUPWISE.gemm(d).b.granularity is r.Granularity.BLOCK
        assert r.BLOCKWISE_128X128.gemm(d).a.granularity is r.Granularity.BLOCK
    assert r.ROWWISE_WITH_GW_HP.wgrad is None
    assert r.ROWWISE_WITH_GW_HP.dgrad.a.rows and not r.ROWWISE_WITH_GW_HP.dgrad.b.rows


def test_formats():
    """e5m2 for a gradient with one scale, and never on both sides: no GEMM takes two."""
    assert r.TENSORWISE.dgrad.a.dtype is r.TENSORWISE.wgrad.a.dtype is r.E5M2
    assert r.TENSORWISE_E4M3.dgrad.a.dtype is r.TENSORWISE_E4M3.wgrad.a.dtype is r.E4M3
    for recipe in (r.TENSORWISE, r.ROWWISE, r.ROWWISE_WITH_GW_HP, r.BLOCKWISE, r.GROUPWISE):
        assert recipe.fwd.a.dtype is recipe.fwd.b.dtype is r.E4M3
        for d in r.DIRECTIONS:
            assert recipe.gemm(d) is None or recipe.gemm(d).b.dtype is r.E4M3


def test_only_the_forward_accumulates_fast():
    for recipe in (r.TENSORWISE, r.ROWWISE, r.ROWWISE_WITH_GW_HP):
        assert recipe.fwd.fast_accum
        for d in ("dgrad", "wgrad"):
            assert recipe.gemm(d) is None or not recipe.gemm(d).fast_accum


def test_accumulation_of_the_rowwise_family():
    for d in r.DIRECTIONS:
        assert r.ROWWISE_FAST.gemm(d).fast_accum and not r.ROWWISE_SLOW.gemm(d).fast_accum
        assert r.ROWWISE_FAST.gemm(d).a == r.ROWWISE_SLOW.gemm(d).a == r.ROWWISE.gemm(d).a


def test_what_keeps_a_nan_to_its_row():
    kept = {g for g in r.Granularity if r.Operand(g).isolates_rows}
    assert kept == {r.Granularity.NONE, r.Granularity.ROW, r.Granularity.GROUP}


def test_recipes_are_frozen():
    with pytest.raises(FrozenInstanceError):
        r.ROWWISE.name = "other"
