"""The built-in lists: names are distinct, and the function-changing passes are in one list only."""

from __future__ import annotations

from loka_compile.passes import registry


def test_names_and_order():
    assert [p.name for p in registry.PREPARE] == ["canonicalize"]
    assert [p.name for p in registry.with_mods()] == [
        "strip_bias",
        "block_norm",
        "hard_swish",
        "fuse",
    ]
    assert [p.name for p in registry.without_mods()] == ["exact_block_norm", "fuse"]
