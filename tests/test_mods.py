"""The Mods policy: what counts as fresh, what sticks, what is unreadable."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loka_compile import mod_set
from loka_compile import mods
from loka_compile.errors import UnreadableParametersError
from loka_compile.ledger import LEDGER


def judged(linear: nn.Linear, norm: nn.LayerNorm) -> list[mods.Judged]:
    return [
        mods.Judged("fc.bias", linear.bias, "linear bias", linear.in_features),
        mods.Judged("norm.weight", norm.weight, "gain"),
        mods.Judged("norm.bias", norm.bias, "norm bias"),
    ]


@pytest.fixture
def parts() -> tuple[nn.Linear, nn.LayerNorm]:
    return nn.Linear(64, 32), nn.LayerNorm(32)


def test_default_initialisation_is_fresh(parts) -> None:
    assert mods.looks_fresh(judged(*parts)).on


@pytest.mark.parametrize("which", ["fc.bias", "norm.weight", "norm.bias"])
def test_any_trained_value_is_not_fresh_and_is_named(parts, which: str) -> None:
    linear, norm = parts
    target = {"fc.bias": linear.bias, "norm.weight": norm.weight, "norm.bias": norm.bias}[which]
    with torch.no_grad():
        target[3] += 0.5
    decision = mods.looks_fresh(judged(linear, norm))
    assert not decision.on and which in decision.why


def test_nothing_to_judge_is_not_fresh() -> None:
    assert not mods.looks_fresh([]).on


def test_options_and_plan_come_before_values(parts) -> None:
    parameters = [parts[0].weight]
    assert mods.decide("on", None, parameters, []).on
    assert not mods.decide("off", mod_set.EVERY, parameters, judged(*parts)).on
    assert mods.decide("auto", mod_set.EVERY, parameters, []).on
    assert not mods.decide("auto", (), parameters, judged(*parts)).on


def test_a_settled_decision_sticks_to_the_parameters(parts) -> None:
    parameters = [parts[0].weight, parts[1].weight]
    first = mods.decide("auto", None, parameters, judged(*parts))
    assert first.on and first.provisional
    mods.settle([LEDGER.entry(p) for p in parameters], first.mods)
    with torch.no_grad():
        parts[1].weight.mul_(2)
    later = mods.decide("auto", None, parameters, judged(*parts))
    assert later.on and not later.provisional


def test_mark_modded_settles_both_ways(parts) -> None:
    model = nn.Sequential(*parts)
    mods.mark_modded(model)
    assert mods.decide("auto", None, list(model.parameters()), []).on
    mods.mark_modded(model, on=False)
    assert not mods.decide("auto", None, list(model.parameters()), judged(*parts)).on


def test_unreadable_parameters_ask_for_a_word() -> None:
    norm = nn.LayerNorm(8, device="meta")
    with pytest.raises(UnreadableParametersError, match=r"norm\.weight.*'mods': 'on'"):
        mods.looks_fresh([mods.Judged("norm.weight", norm.weight, "gain")])


def test_a_stamp_moves_with_writes_and_new_storage(parts) -> None:
    weight = parts[1].weight
    stamp = mods.Stamp([weight])
    assert not any(stamp.moved([weight]) for _ in range(3))
    with torch.no_grad():
        weight.mul_(1.0)
    assert stamp.moved([weight])
    stamp = mods.Stamp([weight])
    weight.data = weight.data.clone()
    assert stamp.moved([weight])


@pytest.mark.parametrize("changed", [[17], range(100), range(40, 60)])
def test_a_stamp_of_many_parameters(changed) -> None:
    """A write is seen by the next call; new storage of several too, that of one in time."""
    many = [nn.Parameter(torch.zeros(2)) for _ in range(100)]
    stamp = mods.Stamp(many)
    assert not any(stamp.moved(many) for _ in range(20))
    for index in changed:
        many[index].data = torch.zeros(2)
    calls = 1 + [stamp.moved(many) for _ in range(mods.Stamp.TURNS)].index(True)
    assert calls == 1 or len(changed) == 1
    stamp = mods.Stamp(many)
    with torch.no_grad():
        many[changed[0]].zero_()
    assert stamp.moved(many)


def test_a_stamp_of_inference_tensors() -> None:
    with torch.inference_mode():
        many = [torch.zeros(2) for _ in range(40)]
    stamp = mods.Stamp(many)
    assert not stamp.moved(many)
    many[3] = torch.zeros(2)
    assert stamp.moved(many)
