"""Sites of a model without running it: on the meta device, with the chains that price them."""

from __future__ import annotations

import pytest
import torch

from loka_compile.model_sites import places_of
from loka_compile.model_sites import zoo_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["wukong", "dcn_v2", "dlrm", "dhen"])
def test_reference_models_have_sites(name):
    model, inputs_of = zoo_model(f"{name}:tiny")
    found = places_of(model, list(inputs_of(256)), CPU)
    assert found and all(one.weight.is_meta for one in found)
    for one in found:
        assert one.place.shape.m % 256 == 0 and one.place.shape.epilogue == one.place.epilogue
        # Some fusions are for no kernel of ours, and price like the GEMM alone.
        assert one.fused or not one.place.epilogue


def test_chains_of_wukong_are_found():
    model, inputs_of = zoo_model("wukong:tiny")
    (x, dense) = inputs_of(64)
    found = {one.site.name: one for one in places_of(model, [x, dense], CPU)}
    first, second = (found[f"layers.0.fmb.mlp.{i}"] for i in (0, 3))
    assert first.place.epilogue.startswith("block_norm:") and first.producer is None
    assert second.producer == "layers.0.fmb.mlp.0"
    assert found["layers.0.lcb"].place.layout == "kn"
    assert not any("head" in name and one.site.n == 1 for name, one in found.items())


def test_it_may_be_asked_again_and_again():
    """Also past the limit that Dynamo has for compiling one function."""
    model, inputs_of = zoo_model("dlrm:tiny")
    for rows in range(100, 109):
        found = places_of(model, list(inputs_of(rows)), CPU)
        assert found[0].place.shape.m == rows


def test_unknown_names_say_the_known_ones():
    with pytest.raises(ValueError, match="wukong"):
        zoo_model("wukon:tiny")
    with pytest.raises(ValueError, match="tiny"):
        zoo_model("wukong:gigantic")


def test_readers_of_a_norm_on_its_own_share_its_result() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(64)
            self.one, self.two = torch.nn.Linear(64, 32), torch.nn.Linear(64, 32)
            self.deep = torch.nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            return torch.relu(self.deep(torch.relu(self.one(y) + self.two(y))))

    with torch.device("meta"):
        model, x = Net(), torch.randn(128, 64)
    found = {one.site.name: one for one in places_of(model, [x], CPU)}
    assert found["one"].bounded is not None
    assert found["one"].bounded == found["two"].bounded
    assert found["deep"].bounded is None
