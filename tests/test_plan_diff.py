"""What differs between two plans, by parts of a model with Mods of their own."""

from __future__ import annotations

from dataclasses import replace

from loka_compile.mod_set import EVERY
from loka_compile.plan import Plan
from loka_compile.plan_diff import diff

SOME = ("block_norm", "hard_swish")
WHOLE = Plan(mods=EVERY, parameters=("a", "a.bias", "b.weight", "c"))


def test_parts_with_other_mods_are_a_difference() -> None:
    part = replace(WHOLE, fewer={"a": SOME, "a.bias": SOME, "b.weight": ("no_bias",)})
    assert WHOLE.digest() != part.digest()
    assert list(diff(WHOLE, part)) == [
        "mods of a, a.bias: on -> on (block_norm, hard_swish)",
        "mods of b.weight: on -> on (no_bias)",
    ]
    assert list(diff(replace(part, fewer={"a": ("no_bias",)}), replace(part, fewer={"c": ()}))) == [
        "mods of a: on (no_bias) -> on",
        "mods of c: on -> off",
    ]
    assert list(diff(part, part)) == []


def test_a_part_that_stays_while_the_rest_changes_is_no_difference_of_its_own() -> None:
    part = replace(WHOLE, fewer={"a": SOME})
    rest = replace(WHOLE, mods=SOME)
    assert list(diff(part, rest)) == ["mods: on -> on (block_norm, hard_swish)"]


def test_a_part_that_only_one_plan_names() -> None:
    grown = replace(WHOLE, parameters=(*WHOLE.parameters, "d"), fewer={"d": SOME})
    assert list(diff(WHOLE, grown)) == ["mods of d: not named -> on (block_norm, hard_swish)"]
