"""Names of sites: module paths, never ids; repeated calls; heads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loka_compile import names
from loka_compile.passes import graph as g
from loka_compile.passes.manager import PassContext
from loka_compile.passes.manager import run_passes
from loka_compile.passes.registry import PREPARE


def sites_of(model: nn.Module, *inputs: torch.Tensor, heads=None) -> list[names.Site]:
    found: list[names.Site] = []

    def backend(gm, example_inputs):
        mine = g.own_copy(gm)
        from loka_compile.options import Options

        mine, _ = run_passes(list(PREPARE), mine, PassContext(Options()))
        found.extend(names.find_sites(mine, example_inputs, heads))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(*inputs)
    return found


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("L['self']._modules['mlp']._modules['0']._parameters['weight']", "mlp.0.weight"),
        ("L['self'].mlp[0].weight", "mlp.0.weight"),
        ("L['model'].layers['a']._parameters['w']", "layers.a.w"),
        ("L['self']._parameters['p']", "p"),
        ("", None),
        (None, None),
    ],
)
def test_parameter_path(source: str | None, path: str | None) -> None:
    assert names.parameter_path(source) == path


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.shared = nn.Linear(32, 32)
        self.raw = nn.Parameter(torch.randn(32, 24))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(24, 24))
        self.narrow = nn.Linear(24, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.shared(self.shared(self.first(x)))
        return self.head(self.narrow(self.normed(h @ self.raw)))


def test_every_kind_of_site() -> None:
    sites = {s.name: s for s in sites_of(Mixed(), torch.randn(5, 3, 16))}
    assert {"first", "shared", "shared#1", "raw", "narrow", "head"} <= set(sites)
    assert (sites["first"].m, sites["first"].k, sites["first"].n) == (15, 16, 32)
    assert (sites["raw"].k, sites["raw"].n) == (32, 24)
    assert sites["shared#1"].call == 1 and sites["shared#1"].weight == sites["shared"].weight
    computed = [s for s in sites.values() if s.refusal]
    assert len(computed) == 1 and "not a parameter" in computed[0].refusal


def test_heads_reach_the_output_through_no_other_linear() -> None:
    sites = {s.name: s for s in sites_of(Mixed(), torch.randn(5, 16))}
    assert [n for n, s in sites.items() if s.head] == ["head"]


def test_a_norm_behind_a_narrow_linear_makes_it_no_head() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8))
    assert not sites_of(model, torch.randn(5, 16))[0].head


def test_head_patterns_replace_the_rule() -> None:
    sites = sites_of(Mixed(), torch.randn(5, 16), heads=["first"])
    assert [s.name for s in sites if s.head] == ["first"]


def test_registered_names_win_and_die_with_the_parameter() -> None:
    block = nn.Sequential(nn.Linear(16, 16))
    names.name_layers(block, prefix="tower.3")
    assert sites_of(block, torch.randn(5, 16))[0].name == "tower.3.0"
    weight = block[0].weight
    key = id(weight)
    assert names.registered_name(weight) == "tower.3.0.weight"
    del block, weight
    torch._dynamo.reset()
    import gc

    gc.collect()
    assert key not in names._REGISTERED


class Square(nn.Module):
    """Square weights: the shape does not tell which way they are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.randn(16, 16))
        self.turned = nn.Parameter(torch.randn(16, 16))
        self.fc = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc((x @ self.raw).relu() @ self.turned.t())


def test_orientation_is_counted_not_guessed() -> None:
    sites = {s.name: s.transposed for s in sites_of(Square(), torch.randn(5, 16))}
    assert sites == {"raw": True, "turned": False, "fc": False}


def test_a_square_parameter_is_quantified_the_way_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from loka_compile import loka_backend
    from loka_compile import planner

    seen: dict[str, torch.Tensor] = {}

    def spy(direction, kernel, w, *rest):
        seen.setdefault(str(len(seen)), w)
        return real(direction, kernel, w, *rest)

    real = planner.quantify
    monkeypatch.setattr(planner, "quantify", spy)
    model = Square()
    options = {"inner": "aot_eager", "emulate": True, "mods": "off", "recipes": ["rowwise"]}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=loka_backend, options=options)
    x = torch.randn(24, 16)
    for _ in range(9):
        compiled(x).square().sum().backward()
    used = list(seen.values())
    # Not fc: with 16 outputs it is a head.
    for want in (model.raw.t(), model.turned):
        assert any(torch.equal(w, want) for w in used)
    assert not any(torch.equal(w, model.raw) for w in used)
