"""What differs between two plans: all that changes what is run."""

from __future__ import annotations

from dataclasses import fields
from dataclasses import replace

import pytest

from loka_compile.mod_set import EVERY
from loka_compile.plan import Choice
from loka_compile.plan import Plan
from loka_compile.plan import SitePlan
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


def test_parameters_that_only_one_plan_names_have_no_mods_in_the_other() -> None:
    shrunk = replace(WHOLE, parameters=("a", "c"))
    assert WHOLE.digest() != shrunk.digest()
    assert list(diff(WHOLE, shrunk)) == ["mods of a.bias, b.weight: on -> not named"]
    assert list(diff(shrunk, WHOLE)) == ["mods of a.bias, b.weight: not named -> on"]
    # Named with no Mod on: they stay off, whatever the model looks like.
    none = replace(WHOLE, mods=())
    assert list(diff(none, replace(none, parameters=("a",)))) == [
        "mods of a.bias, b.weight, c: off -> not named"
    ]


def test_blocks_that_only_one_plan_names() -> None:
    named, plain = replace(WHOLE, blocks={"norm": 128}), replace(WHOLE, blocks={})
    old = replace(WHOLE, blocks=None)
    assert list(diff(named, plain)) == ["norm: block_norm of 128 -> the default"]
    assert list(diff(old, named)) == [
        "norm: block_norm of the default for its width alone -> 128",
        "every other norm: block_norm of the default for its width alone -> the default",
    ]
    assert list(diff(old, plain)) == [
        "every other norm: block_norm of the default for its width alone -> the default"
    ]
    assert list(diff(old, old)) == list(diff(plain, plain)) == []


SITE = SitePlan("a", 64, 32, 16, "bfloat16")
#: Field of a plan -> another value of it, which another model runs, or the same otherwise.
OTHER = {
    "sites": {"a": SITE},
    "mods": SOME,
    "parameters": ("a",),
    "fewer": {"a": SOME},
    "kept": {"no_bias": ("a",)},
    "block": 128,
    "heads": ("a",),
    "blocks": {"norm": 128},
    "emulated": True,
}
SAID_ONLY = {"env": {"device": "cpu"}, "replayed_nats": 1.0}


@pytest.mark.parametrize("name", [f.name for f in fields(Plan)])
def test_no_field_is_forgotten(name: str) -> None:
    value = {**OTHER, **SAID_ONLY}[name]
    found = list(diff(WHOLE, replace(WHOLE, **{name: value})))
    assert bool(found) == (name in OTHER)


@pytest.mark.parametrize("direction", ["fwd", "dgrad", "wgrad"])
def test_sites(direction: str) -> None:
    low = Choice("torch:rowwise", "torch", "rowwise")
    one, other = (
        Plan(sites={"a": replace(SITE, directions={direction: c})})
        for c in (low, low.kept_high("too slow"))
    )
    assert list(diff(one, other)) == [f"a {direction}: torch:rowwise -> high_precision (too slow)"]
    wide = Plan(sites={"a": replace(SITE, N=48)})
    assert list(diff(Plan(sites={"a": SITE}), wide)) == ["a: K=32, N=16 -> K=32, N=48"]
    assert list(diff(one, Plan())) == ["- a: no longer planned"]
