"""Public bug reports restated: programs around the model: hooks, threads, copies, DDP, modes."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn import functional as F

import loka_compile
from loka_compile import loka_backend

FP8 = {
    "inner": "aot_eager",
    "mods": "off",
    "emulate": True,
    "recipes": ["rowwise"],
    "libraries": ["torch"],
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 64)
        self.norm = nn.LayerNorm(64)
        self.b = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.gelu(self.norm(self.a(x))))


def compile_(model: nn.Module, options: dict, **kwargs):
    torch._dynamo.reset()
    return torch.compile(model, backend=loka_backend, options=options, **kwargs)


def train(model: nn.Module, compiled, steps: int = 10) -> None:
    for _ in range(steps):
        model.zero_grad()
        compiled(torch.randn(32, 32)).square().mean().backward()


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got - want).norm() <= 0.15 * want.norm()


def test_hooks_registered_after_the_first_call() -> None:
    """pytorch/pytorch#117758; Dynamo looks at hooks only under this setting."""
    model, x, seen = Net(), torch.randn(32, 32), []
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        compiled = compile_(model, FP8)
        train(model, compiled)
        handle = model.a.register_forward_hook(lambda m, i, o: seen.append(o.detach().clone()))
        compiled(x)
        assert len(seen) == 1
        near(seen[0], F.linear(x, model.a.weight, model.a.bias))
        handle.remove()
        model.a.register_forward_hook(lambda m, i, o: 2 * o)
        near(compiled(x), model(x))
        assert len(seen) == 1


def test_threads() -> None:
    """pytorch/pytorch#118260: four threads, two shapes, while probing and after the swap."""
    model, failures = Net(), []
    compiled = compile_(model, FP8)
    inputs = [torch.randn(rows, 32) for rows in (16, 24)]

    def work(first: int) -> None:
        try:
            for step in range(12):
                x = inputs[(first + step) % 2]
                y = compiled(x)
                near(y, model(x))
                y.sum().backward()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert loka_compile.plan_of(model).active


def test_deepcopy_and_pickle_after_compile() -> None:
    """pytorch/pytorch#128121; keys and prefixes: pytorch/pytorch#158519."""
    model, x = Net(), torch.randn(32, 32)
    keys = list(model.state_dict())
    model.compile(backend=loka_backend, options=FP8)
    for _ in range(10):
        model(x).sum().backward()
    twin = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    assert list(model.state_dict()) == list(twin.state_dict()) == keys
    before = model(x).detach()
    twin.compile(backend=loka_backend, options=FP8)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    near(loaded(x), before)
    assert not twin(x).any() and torch.equal(model(x), before)


def test_children_compiled_on_their_own() -> None:
    """pytorch/pytorch#138715: linears of different shapes shared one artefact."""
    torch._dynamo.reset()
    layers = [nn.Linear(64, 64), nn.Linear(64, 128), nn.Linear(128, 32)]
    compiled = [torch.compile(one, backend=loka_backend, options=FP8) for one in layers]
    for _ in range(10):
        h = want = torch.randn(32, 64)
        for one, layer in zip(compiled, layers, strict=True):
            h, want = one(h), layer(want)
        h.square().mean().backward()
        near(h, want)


@pytest.mark.parametrize("optimize_ddp", [True, False])
def test_ddp(optimize_ddp: bool, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDPOptimizer, on by default, splits the graph and hands over fakes of the parameters."""
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1000)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Net()
        parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)
        with torch._dynamo.config.patch(optimize_ddp=optimize_ddp):
            compiled = compile_(parallel, {**FP8, "mods": "auto"})
            train(model, compiled)
        plan = loka_compile.plan_of(model)
        assert set(plan.sites) == {"a", "b"} and plan.mods
    finally:
        dist.destroy_process_group()


class Counting(CustomGraphPass):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph) -> None:
        self.calls += 1

    def uuid(self) -> str:
        return "counting"


@pytest.mark.slow
@pytest.mark.parametrize("given", ["option", "config"])
def test_the_users_own_inductor_pass_is_kept(given: str) -> None:
    theirs, model = Counting(), Net()
    mine = {"joint_custom_pre_pass": theirs}
    options = {"mods": "off", "inductor": mine if given == "option" else {}}
    with (
        torch.no_grad(),
        torch._inductor.config.patch(mine if given == "config" else {}),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        compile_(model, options)(torch.randn(8, 32))
    assert theirs.calls == 1


@pytest.mark.slow
def test_mode_by_name_and_fullgraph() -> None:
    torch._dynamo.reset()
    model, x = Net(), torch.randn(8, 32)
    with torch.no_grad():
        model.norm.weight.mul_(2)
        compiled = torch.compile(model, backend="loka", mode="reduce-overhead", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
