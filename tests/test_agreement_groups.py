"""Process groups that come and go under a model, in two real processes."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist
from two_ranks import run_both

WORKER = r"""
import json, logging, sys
import torch, torch.distributed as dist
from torch import nn
import loka_compile
from loka_compile import loka_backend

folder, rank, port = sys.argv[1], int(sys.argv[2]), PORT
logging.basicConfig(stream=sys.stderr)
torch.set_num_threads(1)
OPTIONS = {"emulate": True, "mods": "off", "libraries": ["torch"], "recipes": ["rowwise"],
           "inner": "eager"}
torch.manual_seed(0)

def model_of_its_own():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    return model, torch.compile(model, backend=loka_backend, options=OPTIONS)

def train(model, run, steps, together=True):
    active = []
    for _ in range(steps):
        loss = (run(torch.randn(64, 32)) - 1).square().mean()
        loss.backward()
        if together:
            dist.barrier()
        active.append(loka_compile.plan_of(model).active)
    return active.index(True) if True in active else None

out = {"swaps": [], "kernels": [], "losses": []}
half = None
for life in range(2):
    # At one address both times: what the first group left there would be in the way.
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model, run = model_of_its_own()
    out["swaps"].append(train(model, run, 18))
    sites = loka_compile.plan_of(model).sites
    out["kernels"].append({n: s.kernels for n, s in sites.items()})
    if life == 0:
        half = model_of_its_own()
        # Begun to talk, and not done with it.
        assert train(*half, 10) is None
    dist.barrier()
    dist.destroy_process_group()
    if life == 0:
        # Alone from here on, in the middle of a talk.
        out["alone"] = train(*half, 12, together=False)
        out["high"] = not any(c.is_low for s in loka_compile.plan_of(half[0]).sites.values()
                              for c in s.directions.values())
print(json.dumps(out))
"""


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
def test_a_second_group_at_the_address_of_the_first(tmp_path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    (a, log), (b, _) = run_both(tmp_path, WORKER.replace("PORT", str(port)))
    assert a["kernels"] == b["kernels"] and a["swaps"] == b["swaps"]
    for swap, kernels in zip(a["swaps"], a["kernels"], strict=True):
        assert swap is not None
        assert all(k.startswith("torch:rowwise") for one in kernels.values() for k in one)
    # A talk that cannot go on leaves its graph as it was, and says so.
    assert a["high"] and b["high"]
    assert "the process group was destroyed" in log
