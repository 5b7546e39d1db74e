"""Models that FSDP2 shards: the parameters of a graph are not those of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import loka_compile
from loka_compile import loka_backend
from loka_compile.lowering import weight_cache
from loka_compile.lowering.weight_cache import Cache
from loka_compile.lowering.weight_cache import Stored

FP8 = {
    "inner": "aot_eager",
    "mods": "off",
    "emulate": True,
    "recipes": ["rowwise"],
    "libraries": ["torch"],
}


class Block(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.a = nn.Linear(features, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.a(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = Block(32)
        self.two = Block(32)
        self.out = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.two(self.one(x)))


@pytest.fixture(autouse=True)
def alone(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(model: Net) -> Net:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (1,))
    for part in (model.one, model.two, model):
        fully_shard(part, mesh=mesh)
    return model


def train(run, steps: int = 10) -> None:
    for _ in range(steps):
        run(torch.randn(16, 32)).square().mean().backward()


@pytest.mark.parametrize("regional", [False, True])
def test_the_plan_knows_every_layer_by_its_path(regional: bool) -> None:
    torch._dynamo.reset()
    model, options = Net(), {**FP8, "exclude": ["two.*"]}
    if regional:
        loka_compile.name_layers(model)
        for part in (model.one, model.two):
            part.compile(backend=loka_backend, options=options)
        run = shard(model)
    else:
        run = torch.compile(shard(model), backend=loka_backend, options=options)
    train(run)
    plan = loka_compile.plan_of(model)
    assert plan.active and plan.sites["one.a"].choice("fwd").is_fp8
    assert "two.a" not in plan.sites and "a" not in plan.sites
    assert regional or plan.sites["out"].choice("fwd").is_fp8


def test_values_and_gradients() -> None:
    torch._dynamo.reset()
    model, plain = shard(Net()), Net()
    compiled = torch.compile(model, backend=loka_backend, options={**FP8, "emulate": False})
    plain.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
    x = torch.randn(16, 32)
    got, want = compiled(x), plain(x)
    got.square().mean().backward()
    want.square().mean().backward()
    torch.testing.assert_close(got, want)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)


@pytest.mark.parametrize("said", ["apply_mods", "mark_modded"])
def test_what_was_said_before_sharding_holds(said: str) -> None:
    torch._dynamo.reset()
    model = Net()
    if said == "apply_mods":
        # Its `F.silu` is left as it is in eager, so it must be when compiled.
        loka_compile.apply_mods(model)
        shard(model)
    else:
        loka_compile.mark_modded(shard(model))
        nn.init.uniform_(model.one.norm.weight)
    run = torch.compile(model, backend=loka_backend, options={**FP8, "mods": "auto"})
    with loka_compile.explain() as report:
        train(run, 1)
    changed = sum(sum(g.change_counts(lambda _: True).values()) for g in report.graphs)
    assert (changed == 0) == (said == "apply_mods")


def test_a_stored_weight_is_renewed_with_each_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint loaded into the shards moves neither version nor address of what is gathered."""
    model = shard(Net())
    train(model, 1)
    model.unshard()
    w = model.out.weight
    stored = Stored.of(w, "torch:rowwise", torch.float32, False)
    cache = Cache([stored], [0], frozen=False)
    cache.refresh([w])
    monkeypatch.setattr(weight_cache, "_version", lambda _: 0)
    before = stored.scale.clone()
    version = w._version
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(w):
        w.mul_(2)
    assert w._version == version
    cache.refresh([w])
    torch.testing.assert_close(stored.scale, before * 2)


@pytest.mark.parametrize("mods", ["off", "on"])
def test_a_graph_of_dtensors_is_compiled_as_written(mods: str, caplog) -> None:
    """Tensor parallelism: DTensors have no rule for ops that they do not know."""
    from torch.distributed.tensor.parallel import ColwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module

    torch._dynamo.reset()
    mesh = dist.init_device_mesh("cpu", (1,))
    layers = nn.Sequential(nn.Linear(32, 32), nn.SiLU())
    model = parallelize_module(layers, mesh, {"0": ColwiseParallel()})
    compiled = torch.compile(model, backend=loka_backend, options={**FP8, "mods": mods})
    x = torch.randn(16, 32)
    with loka_compile.explain() as report:
        got = compiled(x)
        got.square().mean().backward()
    torch.testing.assert_close(got, model(x))
    assert "takes DTensor" in report.text() and "takes DTensor" in caplog.text
    assert "Traceback" not in caplog.text
