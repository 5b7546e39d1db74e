"""One plan on all ranks: two real processes over gloo, and the protocol alone over a store."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from beside import DIRECTIONS
from beside import FP8
from beside import beside_another
from torch import nn
from two_ranks import run_both

import loka_compile
from loka_compile import agreement
from loka_compile import changeover
from loka_compile import loka_backend
from loka_compile import ranks
from loka_compile.agreement import AHEAD
from loka_compile.agreement import ATTEMPTS
from loka_compile.agreement import Agreement
from loka_compile.ledger import LEDGER
from loka_compile.plan import Plan
from loka_compile.plan import SitePlan
from loka_compile.ranks import World


def plans_of(*names: str) -> dict[str, SitePlan]:
    return {n: SitePlan(n, 16, 32, 64, "float32", directions=dict.fromkeys(DIRECTIONS, FP8))
            for n in names}  # fmt: skip


class Rank:
    """One rank's side, called step by step in this process."""

    def __init__(self, store, rank: int, size: int, objections=(), facts: str = "same") -> None:
        self.store = store
        self.talk = Agreement(World(store, rank, size).channel("x"))
        self.objections, self.facts, self.asked = list(objections), facts, 0
        self.swapped: int | None = None
        self.verdict = None
        self.plans = plans_of("a", "b")

    def step(self, ready: bool = True) -> None:
        self.talk.clock += 1
        if not ready or self.swapped is not None:
            return
        self.verdict = self.talk.poll(self.facts, self._propose, lambda plans: self.objections)
        if self.verdict is not None:
            self.swapped = self.talk.clock

    def _propose(self):
        self.asked += 1
        return self.plans


def ranks_of(size: int, **own) -> list[Rank]:
    store = dist.HashStore()
    made = [Rank(store, r, size, **own.get(f"r{r}", {})) for r in range(size)]
    for one in made:
        one.talk.join()
    return made


def test_all_change_at_the_same_call_to_the_same_plan() -> None:
    three = ranks_of(3)
    for _ in range(12):
        for one in reversed(three):
            one.step()
    assert len({one.swapped for one in three}) == 1 and three[0].swapped <= 4 + AHEAD
    assert [one.asked for one in three] == [1, 0, 0]
    assert all(one.verdict.plans == plans_of("a", "b") for one in three)
    assert len({one.verdict.digest for one in three}) == 1 and "one plan" in str(three[1].verdict)


def test_a_rank_that_is_ahead_changes_with_the_others() -> None:
    """Hosts run ahead of their devices: by one call here when the plan is published."""
    a, b = ranks_of(2)
    b.step(ready=False)
    for _ in range(12):
        a.step()
        b.step()
    assert b.swapped == a.swapped


def test_an_objection_holds_on_every_rank_and_says_whose_it_is() -> None:
    two = ranks_of(2, r1={"objections": [("a", "fwd", "no FP8 units")]})
    for _ in range(12):
        for one in two:
            one.step()
    for one in two:
        choice = one.verdict.plans["a"].choice("fwd")
        assert not choice.is_fp8 and "rank 1: no FP8 units" in choice.reason
        assert choice.mere_clamped == 0.1
        assert one.verdict.plans["a"].choice("dgrad").is_fp8
        assert "because of rank 1, at a fwd: no FP8 units" in str(one.verdict)


def test_what_is_sent_does_not_grow_with_the_ranks() -> None:
    many = ranks_of(
        8, **{f"r{r}": {"objections": [("a", "fwd", f"{r} is odd")]} for r in range(1, 8)}
    )
    for _ in range(20):
        for one in many:
            one.step()
    for one in many:
        assert one.verdict.objections == ((1, ("a", "fwd", "1 is odd")),)
        assert not one.verdict.plans["a"].choice("fwd").is_fp8


def test_ranks_whose_models_differ_stay_in_high_precision() -> None:
    two = ranks_of(2, r0={"facts": "the Mods on"}, r1={"facts": "the Mods off"})
    for _ in range(12):
        for one in two:
            one.step()
    for one in two:
        assert not any(c.is_fp8 for p in one.verdict.plans.values() for c in p.directions.values())
        assert "rank 0 has the Mods on, rank 1 the Mods off" in str(one.verdict)


def test_a_rank_that_can_run_nothing_ends_the_talk() -> None:
    store = dist.HashStore()
    a, b = Rank(store, 0, 2), Rank(store, 1, 2)
    a.talk.join()
    b.talk.refuse("compute capability 8.0 has no FP8 units")
    a.step()
    assert a.verdict.plans == {} and "rank 1" in str(a.verdict) and "8.0" in str(a.verdict)


def test_a_rank_that_never_answers_does_not_hold_up_the_rest(monkeypatch) -> None:
    monkeypatch.setattr(changeover, "PATIENCE_SECONDS", 0.0)
    a, b = ranks_of(2)
    for _ in range(3 * changeover.PATIENCE_CALLS):
        a.step()
    assert a.verdict.missing == (1,) and "without rank 1" in str(a.verdict)
    # It comes late, and takes what stands but for what it cannot run itself.
    b.objections = [("b", "wgrad", "late")]
    b.step()
    assert b.swapped is None or b.talk.clock >= a.swapped
    for _ in range(a.swapped):
        b.step()
    assert b.verdict.digest == a.verdict.digest
    assert not b.verdict.plans["b"].choice("wgrad").is_fp8


def test_without_rank_0_the_first_of_the_others_leads(monkeypatch) -> None:
    """A pipeline: these layers do not exist on rank 0."""
    monkeypatch.setattr(changeover, "PATIENCE_SECONDS", 0.0)
    store = dist.HashStore()
    two = [Rank(store, r, 3) for r in (1, 2)]
    for one in two:
        one.talk.join()
    for _ in range(2 * changeover.PATIENCE_CALLS):
        for one in two:
            one.step()
    assert two[0].swapped == two[1].swapped and [one.asked for one in two] == [1, 0]


def test_who_cannot_propose_leaves_all_in_high_precision() -> None:
    a, b = ranks_of(2)

    def propose():
        raise RuntimeError("out of luck")

    a._propose = propose
    for _ in range(4):
        a.step()
        b.step()
    assert a.verdict.plans == b.verdict.plans == {} and "out of luck" in str(b.verdict)


@pytest.mark.parametrize("lost_after", [1, 2, 3])
def test_who_proposes_and_is_lost_holds_up_nobody_for_good(monkeypatch, lost_after) -> None:
    """Lost before it proposes, before it concludes, before all know when."""
    monkeypatch.setattr(changeover, "PATIENCE_SECONDS", 0.0)
    a, b, c = ranks_of(3, r1={"objections": [("a", "fwd", "no FP8 units")]})
    for step in range(4 * changeover.PATIENCE_CALLS):
        if step < lost_after:
            a.step()
        b.step()
        c.step()
    assert b.swapped == c.swapped is not None and b.verdict.plans == c.verdict.plans
    assert b.verdict.plans["b"].choice("fwd").is_fp8
    assert [one.asked for one in (a, b, c)] == ([0, 1, 0] if lost_after == 1 else [1, 0, 0])
    # The last one it has seen itself: to the others it is there.
    assert b.talk.changeover.missing == ([] if lost_after == 3 else [0] * (lost_after == 2))
    assert b.verdict.missing == ((0,) if lost_after == 1 else ())


class Counted:
    """A store, and how often it was asked."""

    def __init__(self) -> None:
        self.store, self.asked = dist.HashStore(), 0

    def __getattr__(self, name):
        self.asked += 1
        return getattr(self.store, name)


def test_who_waits_asks_the_store_little_and_ever_less() -> None:
    """Each question is a round trip to rank 0's host, for each graph at each call."""
    store = Counted()
    made = [Rank(store, r, 64) for r in range(3)]
    for one in made:
        one.talk.join()
    asked: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(80):
        for rank, counts in asked.items():  # The third is not ready, for as long as this takes.
            before = store.asked
            made[rank].step()
            counts.append(store.asked - before)
    assert max(asked[0][1:]) <= 4 and max(asked[1][1:]) <= 2
    assert sum(asked[0][16:]) <= 4 * 9 and sum(asked[1][16:]) <= 2 * 9
    before = store.asked
    made[2].talk.poll("same", dict, lambda plans: [])
    assert store.asked - before <= 6


def test_a_damaged_plan_and_a_lost_store_are_said(monkeypatch) -> None:
    a, b = ranks_of(2)
    numbers = itertools.count()
    monkeypatch.setattr(Plan, "digest", lambda self: str(next(numbers)))
    a.talk.refuse("x")
    for _ in range(ATTEMPTS):
        b.step()
    assert "has the hash" in b.verdict.why and b.verdict.plans == {}

    class Gone:
        def __getattr__(self, name):
            raise RuntimeError("connection reset")

    gone = Gone()
    lost = Rank(gone, 0, 2)
    lost.talk.join()
    while lost.verdict is None and lost.talk.clock < 2 * ATTEMPTS:
        lost.step()
    assert lost.talk.clock > 1
    assert "connection reset" in lost.verdict.why


def test_a_process_without_distributed_pays_nothing(monkeypatch) -> None:
    """No store is looked for, no binding talks, and the plan comes at the step after the eighth."""
    monkeypatch.setattr(ranks._compat, "default_store", None)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    options = {"inner": "eager", "emulate": True, "mods": "off"}
    run = torch.compile(model, backend=loka_backend, options=options)
    for step in range(10):
        run(torch.randn(16, 32)).sum().backward()
        assert loka_compile.plan_of(model).active == (step >= 8)
    assert not LEDGER.entry(model[0].weight).agreements
    assert agreement.about([("a", 1, 2)], {}) is None


def small() -> nn.Sequential:
    torch._dynamo.reset()
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


@pytest.mark.parametrize("disturbed", [False, True])
def test_what_stands_and_is_not_in_force_yet_outlives_a_new_binding(monkeypatch, disturbed) -> None:
    """Decisions about other layers, or a first backward, bind a graph anew at any step."""
    other = beside_another(monkeypatch)
    model = small()
    options = {"inner": "eager", "emulate": True, "mods": "off", "recipes": ["rowwise"]}
    run = torch.compile(model, backend=loka_backend, options=options)
    theirs, swap = None, None
    for step in range(20):
        run(torch.randn(16, 32)).sum().backward()
        if swap is None and loka_compile.plan_of(model).active:
            swap = step + 1
        (ours,) = LEDGER.entry(model[0].weight).agreements.values()
        if theirs is None:
            theirs = Agreement(other.channel(ours.channel.name))
            theirs.join()
        theirs.clock += 1
        theirs.poll("the Mods off", dict, lambda plans: [("0", "fwd", "no FP8 units")])
        if disturbed and ours.verdict is not None:
            LEDGER.touch()
    assert swap == ours.changeover.at == theirs.changeover.at and ours.settled
    first = loka_compile.plan_of(model).sites["0"]
    assert not first.choice("fwd").is_fp8 and "no FP8 units" in first.choice("fwd").reason
    assert first.choice("wgrad").is_fp8


def test_every_graph_runs_the_plan_that_was_agreed_on(monkeypatch) -> None:
    """Training and inference, a graph of a later shape; another plan is talked about anew."""
    other = beside_another(monkeypatch)
    model = small()
    given = Plan(sites={n: SitePlan(n, 16, k, 96 - k, "float32",
                                    directions=dict.fromkeys(DIRECTIONS, FP8))
                        for n, k in (("0", 32), ("2", 64))})  # fmt: skip
    options = {"inner": "eager", "emulate": True, "mods": "off", "plan": given}
    run = torch.compile(model, backend=loka_backend, dynamic=False, options=options)

    def forward_of_first() -> str:
        return loka_compile.plan_of(model).sites["0"].kernels[0]

    theirs = None
    for _ in range(20):
        run(torch.randn(16, 32)).sum().backward()
        (ours,) = LEDGER.entry(model[0].weight).agreements.values()
        if theirs is None:
            theirs = Agreement(other.channel(ours.channel.name))
            theirs.join()
            assert forward_of_first() == "torch:rowwise"
        theirs.clock += 1
        theirs.poll("the Mods off", dict, lambda plans: [("0", "fwd", "no FP8 units")])
    assert ours.settled and forward_of_first() == "high_precision"
    run(torch.randn(48, 32)).sum().backward()
    assert forward_of_first() == "high_precision"
    with torch.no_grad():
        run(torch.randn(24, 32))
    assert forward_of_first() == "high_precision"
    assert len(LEDGER.entry(model[0].weight).agreements) == 1
    changed = Plan(sites={"0": given.sites["0"]})
    torch._dynamo.reset()
    run = torch.compile(model, backend=loka_backend, options={**options, "plan": changed})
    run(torch.randn(16, 32)).sum().backward()
    assert forward_of_first() == "torch:rowwise"
    assert len(LEDGER.entry(model[0].weight).agreements) == 2


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

out = {}
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
