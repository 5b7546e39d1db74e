"""The built-in Mods are patterns like a user's: they check, and cost little before they match."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import loka_compile
from loka_compile import user_patterns
from loka_compile.passes import block_norm
from loka_compile.passes import hard_swish
from loka_compile.passes import registry
from loka_compile.passes import strip_bias
from loka_compile.passes.mod import Mod

MODS = [strip_bias.STRIP_BIAS, block_norm.BLOCK_NORMS, hard_swish.HARD_SWISH]
EVERY = {f"{mod.name}.{op}": p for mod in MODS for op, p in mod.patterns.items()}
EVERY["exact_block_norm.rms_norm"] = block_norm.exact_rms_norm


def test_the_registry_runs_these():
    mods = [one for one in registry.with_mods() if isinstance(one, Mod)]
    assert mods == MODS
    assert registry.without_mods()[0] is block_norm.EXACT_BLOCK_NORM


@pytest.mark.parametrize("name", [n for n in EVERY if n != "hard_swish.sigmoid"])
def test_each_matches_its_own_example(name, monkeypatch):
    one = EVERY[name]
    shapes = one.example
    # Here they are tried, which the Mods leave out.
    monkeypatch.setattr(one, "_pass", None)
    # Their examples are only shapes: memory that nobody has written may hold anything.
    monkeypatch.setattr(one, "example", lambda: [_filled(v) for v in shapes()])
    if "strip_bias" in name:
        # A bias that is no parameter stays.
        with pytest.raises(loka_compile.errors.PatternError, match="bias is computed"):
            loka_compile.check_pattern(one)
        return
    found = loka_compile.check_pattern(one)
    assert found.matches == 1
    if "rms_norm" in name:
        assert found.max_error < 1e-5
        assert found.max_gradient_error < 1e-4


def test_the_gate_is_no_gate_alone():
    with pytest.raises(loka_compile.errors.PatternError, match="matches its own example 0 times"):
        loka_compile.check_pattern(hard_swish.gate)


def test_none_is_traced_for_a_graph_without_its_op(capture, monkeypatch):
    made = []
    as_pass = user_patterns.Pattern.as_pass
    monkeypatch.setattr(
        user_patterns.Pattern, "as_pass", lambda self, **_: made.append(self.name) or as_pass(self)
    )
    captured = capture(nn.Sequential(nn.Linear(4, 6), nn.ReLU()), MODS)
    captured(torch.randn(3, 4))
    assert made == ["linear_bias"]


def test_one_call_for_one_keeps_the_node(capture):
    """Name, place and site of the node stay; diffs show the line that changed and no other."""
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.SiLU(), nn.Linear(6, 6))
    plain, modded = capture(model), capture(model, MODS)
    for captured in (plain, modded):
        captured(torch.randn(3, 4))
    names = [
        [n.name for n in c.after[0].graph.nodes if n.target in (F.silu, F.hardswish, LINEAR)]
        for c in (plain, modded)
    ]
    assert names[0] == names[1]
    assert modded.count(F.hardswish) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_eps_that_is_a_graph_input_says_so(dynamic, capture):
    captured = capture(lambda x, eps: F.layer_norm(x, (8,), None, None, eps), MODS, dynamic=dynamic)
    captured(torch.randn(3, 8), 1e-3)
    captured(torch.randn(3, 8), 1e-2)
    told = "eps is a graph input" in captured.refusals("block_norm")
    assert told or captured.notes("changes", "block_norm")
    assert told == any(
        n.op == "placeholder" and "eps" in n.name for gm in captured.after for n in gm.graph.nodes
    )


def test_inside_a_transform_all_is_left_as_written(capture, close):
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.SiLU())
    captured = capture(lambda x: torch.vmap(lambda row: model(row))(x), MODS)
    x = torch.randn(3, 4)
    close(captured(x), model(x))
    assert captured.notes("changes") == []
    for mod in MODS:
        assert "functorch" in captured.refusals(mod.name)


LINEAR = torch._C._nn.linear


def _filled(value):
    return torch.randn(value.shape) if isinstance(value, torch.Tensor) else value
