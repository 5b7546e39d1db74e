"""One plan on all ranks: two real processes over gloo, and over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from two_ranks import run_both

WORKER = r"""
import json, logging, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import loka_compile
from loka_compile import eligibility, loka_backend
from loka_compile.lowering.recipes import HIGH_PRECISION

folder, rank = sys.argv[1], int(sys.argv[2])
logging.basicConfig(stream=sys.stderr)
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
BASE = {"emulate": True, "mods": "off", "libraries": ["torch"]}

class Net(nn.Sequential):
    def forward(self, x):
        return self[2](self[1](self[0](x)))

def train(steps, options, ddp="", inner="eager", wide=False):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    whole = DistributedDataParallel(model) if ddp == "inside" else model
    run = torch.compile(whole, backend=loka_backend, options={**BASE, **options, "inner": inner})
    if ddp == "around":
        run = DistributedDataParallel(run)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    generator = torch.Generator().manual_seed(rank)
    losses, active = [], []
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator)
        y = x
        if wide and rank == 1:
            # Rows of very different size: one scale for all of them loses the small ones.
            x = x * torch.logspace(-6, 3, 64).unsqueeze(1)
        out = run(x)
        scale = x.norm(dim=1, keepdim=True)
        loss = ((out / scale if wide else out) - y).square().mean()
        loss.backward()
        if not ddp:
            dist.barrier()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        active.append(loka_compile.plan_of(model).active)
    plan = loka_compile.plan_of(model)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return plan, {
        "digest": plan.digest(),
        "swap": active.index(True) if True in active else None,
        "losses": losses,
        "weights": weights.double().sum().item(),
        "kernels": {n: s.kernels for n, s in plan.sites.items()},
        "reasons": [c.reason for s in plan.sites.values() for c in s.directions.values()],
    }

def gradients(static):
    # Per step, where all ranks have the same batch: their mean is what one process computes.
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    whole = DistributedDataParallel(model, static_graph=True) if static else model
    options = {**BASE, "force": {"*": "torch:tensorwise"}, "inner": "aot_eager"}
    run = torch.compile(whole, backend=loka_backend, options=options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(4):
        optimizer.zero_grad()
        run(torch.randn(64, 32, generator=generator)).square().mean().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        optimizer.step()
    return torch.stack(found), loka_compile.plan_of(model).active

out = {}
(alone, _), (static, active) = gradients(False), gradients(True)
error = (static - alone).norm(dim=1) / alone.norm(dim=1)
out["static"] = {"error": error.max().item(), "active": active}
plan, out["ddp"] = train(24, {"recipes": ["rowwise"]}, ddp="inside", inner="aot_eager")
_, out["around"] = train(18, {"recipes": ["rowwise"]}, ddp="around", inner="aot_eager")
_, out["data"] = train(20, {"recipes": ["tensorwise"]}, wide=True)
runnable, eligible = eligibility.runnable, eligibility.eligible
if rank == 1:
    eligibility.runnable = lambda kernel, device, options: HIGH_PRECISION
_, out["hardware"] = train(20, {"recipes": ["rowwise"]})
eligibility.runnable = runnable
if rank == 1:
    eligibility.eligible = lambda *args: frozenset()
_, out["nothing"] = train(20, {"recipes": ["rowwise"]})
eligibility.eligible = eligible
given = dict(plan.to_dict(), sites=[])
for site in plan.to_dict()["sites"]:
    site["name"] = site["name"].replace("module.", "")
    if rank == 1:
        site["directions"]["fwd"]["kernel"] = "torch:tensorwise"
    given["sites"].append(site)
_, out["pinned"] = train(20, {"plan": given})
print(json.dumps(out))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict, str]]:
    return run_both(tmp_path_factory.mktemp("ranks"), WORKER)


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
class TestTwoProcesses:
    @pytest.mark.parametrize("case", ["ddp", "around", "data", "hardware", "nothing", "pinned"])
    def test_one_plan(self, both, case: str) -> None:
        (a, _), (b, _) = both
        assert a[case]["kernels"] == b[case]["kernels"] or case == "nothing"
        if case != "nothing":
            assert a[case]["digest"] == b[case]["digest"]
            assert a[case]["swap"] == b[case]["swap"] is not None

    @pytest.mark.parametrize("case", ["ddp", "around"])
    def test_ddp_trains_on_across_the_swap(self, both, case: str) -> None:
        (a, _), (b, _) = both
        a, b = a[case], b[case]
        assert 8 < a["swap"] < 20 and a["weights"] == b["weights"]
        assert all(k.startswith("torch:rowwise") for site in a["kernels"].values() for k in site)
        assert a["losses"][-1] < a["losses"][0]
        around = a["losses"][a["swap"] - 2 : a["swap"] + 3]
        assert max(around) < 1.3 * min(around)

    def test_a_static_graph_takes_nothing_from_another_step(self, both) -> None:
        for found, _ in both:
            assert found["static"]["active"] and found["static"]["error"] < 1e-6

    def test_a_kernel_must_be_accurate_on_every_ranks_data(self, both) -> None:
        for rank, (found, log) in enumerate(both):
            high = [r for r in found["data"]["reasons"] if "rank 1:" in r]
            assert high and any("torch:tensorwise" in r for r in high), rank
            assert "because of rank 1" in log

    def test_other_hardware_on_one_rank_is_said_on_all(self, both) -> None:
        for found, _ in both:
            kernels = [k for site in found["hardware"]["kernels"].values() for k in site]
            assert kernels and set(kernels) == {"high_precision"}
            assert any("rank 1: " in r for r in found["hardware"]["reasons"])
        assert "high precision on every rank" in both[0][1]

    def test_a_rank_that_can_run_nothing(self, both) -> None:
        kernels = both[0][0]["nothing"]["kernels"]
        assert kernels and {k for site in kernels.values() for k in site} == {"high_precision"}
        assert any("because of rank 1" in r for r in both[0][0]["nothing"]["reasons"])

    def test_rank_0s_plan_is_used_where_another_was_given(self, both) -> None:
        for found, _ in both:
            assert {s[0] for s in found["pinned"]["kernels"].values()} == {"torch:rowwise"}
        assert "not that of the others" in both[1][1] and "not that of the others" not in both[0][1]


NCCL = r"""
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import loka_compile

folder, rank = sys.argv[1], int(sys.argv[2])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)

class Net(nn.Sequential):
    def forward(self, x):
        return self[2](self[1](self[0](x)))

torch.manual_seed(0)
model = Net(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048)).cuda().bfloat16()
run = torch.compile(DistributedDataParallel(model), backend="loka", options={"mods": "off"})
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
generator = torch.Generator("cuda").manual_seed(rank)
active, losses = [], []
for _ in range(40):
    x = torch.randn(8192, 2048, device="cuda", generator=generator).bfloat16()
    loss = (run(x) - x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    active.append(loka_compile.plan_of(model).active)
    losses.append(loss.item())
plan = loka_compile.plan_of(model)
print(json.dumps({
    "digest": plan.digest(), "swap": active.index(True) if True in active else None,
    "losses": losses, "kernels": {n: s.kernels for n, s in plan.sites.items()},
    "weights": sum(p.detach().double().sum().item() for p in model.parameters()),
}))
dist.destroy_process_group()
"""


@pytest.mark.gpu
def test_two_gpus_over_nccl(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    (a, _), (b, _) = run_both(tmp_path, NCCL)
    assert a["digest"] == b["digest"] and a["kernels"] == b["kernels"]
    assert a["swap"] == b["swap"] is not None and a["weights"] == b["weights"]
    assert a["losses"][-1] < a["losses"][0]
