"""The built-in lists, and the places of a user's passes among them."""

from __future__ import annotations

import pytest

from loka_compile.errors import PatternError
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


class Named:
    def __init__(self, name, before=None, after=None):
        self.name, self.before, self.after = name, before, after


def names(*patterns, mods=True):
    built_in = registry.with_mods() if mods else registry.without_mods()
    return [p.name for p in registry.order(patterns, built_in)]


def test_order():
    assert names(Named("p"), Named("q"))[:3] == ["p", "q", "strip_bias"]
    assert names(Named("p", after="q"), Named("q"))[:2] == ["q", "p"]
    assert names(Named("p"), Named("q", before="p"))[:2] == ["q", "p"]
    want = ["strip_bias", "p", "block_norm", "q", "hard_swish", "fuse"]
    assert names(Named("q", after="block_norm"), Named("p", before="block_norm")) == want
    # A place holds where the pass itself is not run.
    assert names(Named("p", after="hard_swish"), mods=False) == ["exact_block_norm", "p", "fuse"]
    assert names(Named("p", before=("fuse", "dispatch"), after="hard_swish"))[3:] == ["p", "fuse"]
    assert names(Named("p", after="fuse"), Named("q", after="p"))[-2:] == ["p", "q"]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ([Named("p", before="strip_bais")], "no pass is named 'strip_bais'; did you mean 'strip_b"),
        ([Named("p", after="crosss"), Named("cross")], "did you mean 'cross'"),
        ([Named("p", after="q"), Named("q", after="p")], "circle: p waits for q waits for p"),
        ([Named("p", after="fuse", before="strip_bias")], "order is a circle"),
        ([Named("p"), Named("p")], "two different patterns have this name"),
        ([Named("fuse")], "a built-in pass has this name"),
    ],
)
def test_order_errors(patterns, message):
    with pytest.raises(PatternError, match=message):
        registry.order(patterns, registry.with_mods())
