"""A kernel that fails on one rank is given up by all: the board alone, and two real processes."""

from __future__ import annotations

import gc
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from two_ranks import run_both

from loka_compile import demotion
from loka_compile import failure_board
from loka_compile import loka_backend
from loka_compile.failure_board import Board
from loka_compile.ranks import World

KERNEL = ("torch:rowwise", "fwd", 32, 64)


@pytest.fixture
def two(monkeypatch):
    """Boards of two ranks over one store, looked at as often as asked."""
    monkeypatch.setattr(failure_board, "EVERY", 0.0)
    store = dist.HashStore()
    worlds = [World(store, rank, 2) for rank in range(2)]
    heard: list[list[tuple[int, failure_board.Failure]]] = [[], []]
    boards = [Board(lambda rank, f, i=i: heard[i].append((rank, f))) for i in range(2)]

    def on(rank: int, store=store):  # Worlds do not keep it.
        monkeypatch.setattr(failure_board, "world", lambda: worlds[rank])
        boards[rank].attend()
        return boards[rank]

    return on, heard


def test_all_hear_all_in_one_order(two) -> None:
    on, heard = two
    on(0), on(1)
    on(1).say((*KERNEL, "first"))
    on(0).say((*KERNEL, "second"))
    on(1).look_if_due()
    assert heard[0] == heard[1] == [(1, (*KERNEL, "first")), (0, (*KERNEL, "second"))]
    on(0).look()
    assert len(heard[0]) == 2


def test_a_rank_that_dies_while_it_speaks_holds_back_nobody(two, monkeypatch) -> None:
    on, heard = two
    board = on(0)
    store = board._channel.world.store

    class Dies:
        """After one word."""

        said = 0

        def __getattr__(self, name):
            if name not in ("check", "get") and self.said:
                raise RuntimeError("killed")
            self.said += name not in ("check", "get")
            return getattr(store, name)

    dying = Dies()
    monkeypatch.setattr(board._channel, "world", World(dying, 0, 2))
    board.say((*KERNEL, "first"))
    on(1).say((*KERNEL, "second"))
    on(1).look()
    assert [f[-1] for _, f in heard[1]] == ["first", "second"]


def test_what_is_said_twice_because_the_store_lost_an_answer_is_heard_once(two) -> None:
    on, heard = two
    board = on(0)
    store = board._channel.world.store

    class Loses:
        lost = 0

        def __getattr__(self, name):
            def call(*args):
                found = getattr(store, name)(*args)
                if name == "compare_set" and not self.lost:
                    self.lost = 1
                    raise RuntimeError("timeout")
                return found

            return call

    losing = Loses()
    board._channel.world = World(losing, 0, 2)
    board.say((*KERNEL, "first"))
    on(1).look()
    assert losing.lost and len(heard[0]) == len(heard[1]) == 1


def test_a_failure_before_there_were_other_ranks_is_told_to_them(two, monkeypatch) -> None:
    on, heard = two
    monkeypatch.setattr(failure_board, "world", lambda: None)
    early = Board(lambda *_: None, lambda: [(*KERNEL, "early")])
    early.attend()
    on(1)
    worlds = on(0)._channel.world
    monkeypatch.setattr(failure_board, "world", lambda: worlds)
    early.attend()
    on(1).look()
    assert heard[1] == [(0, (*KERNEL, "early"))]


def test_a_store_that_is_gone_ends_the_looking_and_nothing_else(two, monkeypatch, caplog) -> None:
    on, heard = two
    board = on(0)
    monkeypatch.setattr(board._channel, "has", lambda *what: 1 / 0)
    board.look()
    assert "cannot be reached" in caplog.text
    assert board.next == math.inf
    board.say((*KERNEL, "why"))
    assert heard[0] == []


def test_a_group_that_was_ended_is_no_store_that_was_lost(two, monkeypatch, caplog) -> None:
    """A program that goes on alone, to evaluate or to export."""
    on, _ = two
    board = on(0)
    monkeypatch.setattr(failure_board, "world", lambda: None)
    board.look()
    assert not board.listens and not caplog.records


def test_without_other_ranks_nothing_is_said_or_asked(monkeypatch) -> None:
    board = Board(lambda *_: pytest.fail("heard something"))
    board.attend(training=True)
    board.say((*KERNEL, "why"))
    board.look_if_due()
    assert board.next == math.inf


def test_the_first_word_stands_and_names_its_rank(monkeypatch, caplog) -> None:
    monkeypatch.setattr(demotion, "_FAILED", {})
    monkeypatch.setattr(demotion, "_SHARED", set())
    demotion._heard(3, (*KERNEL, "RuntimeError: a"))
    demotion._heard(0, (*KERNEL, "RuntimeError: b"))
    assert demotion._FAILED == {KERNEL: "rank 3: RuntimeError: a"}
    assert caplog.text.count("on rank 3") == 1


def test_graphs_without_gradients_look_only_where_nothing_trains(monkeypatch) -> None:
    monkeypatch.setattr(failure_board, "EVERY", 0.0)
    looks: list[int] = []
    monkeypatch.setattr(demotion.BOARD, "look", lambda: looks.append(1))
    monkeypatch.setattr(demotion.BOARD, "next", 0.0)
    monkeypatch.setattr(demotion.BOARD, "_trains", False)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    run = torch.compile(model, backend=loka_backend, options={"inner": "eager", "emulate": True})
    with torch.no_grad():
        run(torch.randn(16, 32))
    assert looks
    run(torch.randn(16, 32)).sum().backward()
    count = len(looks)
    with torch.no_grad():
        run(torch.randn(16, 32))
    assert len(looks) == count


def test_a_training_graph_is_no_moment_to_look_while_a_backward_may_come(monkeypatch) -> None:
    monkeypatch.setattr(failure_board, "PENDING", pending := {1})
    board = Board(lambda *_: None)
    looks: list[int] = []
    monkeypatch.setattr(board, "look", lambda: looks.append(1))
    board.called(training=True)
    assert not looks  # Nobody to hear.
    board.next = 0.0
    board.called(training=True)
    assert not looks
    pending.clear()
    board.called(training=True)
    assert len(looks) == 1
    board.blind = True
    board.called(training=True)
    assert len(looks) == 1


@pytest.mark.parametrize("ends", ["backward", "dropped"])
def test_forwards_are_pending_until_their_backward(ends) -> None:
    torch._dynamo.reset()
    gc.collect()
    before = set(failure_board.PENDING)
    model = nn.Linear(32, 64)
    options = {"inner": "aot_eager", "emulate": True, "heads": (), "force": {"*": "torch:rowwise"}}
    run = torch.compile(model, backend=loka_backend, options=options)
    first, second = (run(torch.randn(16, 32)).sum() for _ in range(2))
    assert len(failure_board.PENDING - before) == 2
    if ends == "backward":
        # They are over with it, not when somebody lets go of the loss.
        first.backward()
        assert len(failure_board.PENDING - before) == 1
        second.backward()
    else:
        del first, second
    assert before == failure_board.PENDING


WORKER = r"""
import json, logging, sys
import torch, torch.distributed as dist
from torch import nn
import loka_compile
from loka_compile import failure_board, loka_backend
from loka_compile.lowering import gemm

folder, rank = sys.argv[1], int(sys.argv[2])
logging.basicConfig(stream=sys.stderr)
torch.set_num_threads(1)
failure_board.EVERY = 0.0
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

scaled, broken = gemm._scaled, set()

def run_scaled(a, b, direction, *rest):
    if direction in broken:
        raise RuntimeError(f"CUBLAS_STATUS_NOT_SUPPORTED in the {direction}")
    return scaled(a, b, direction, *rest)

gemm._scaled = run_scaled
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
options = {"emulate": True, "mods": "off", "inner": "eager", "force": {"*": "torch:rowwise"}}
run = torch.compile(model, backend=loka_backend, options=options)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
fp8, losses = [], []
for step in range(8):
    if rank == 1 and step == 2:
        broken.add("fwd")
    if rank == 0 and step == 4:
        broken.add("wgrad")
    x = torch.randn(64, 32)
    loss = (run(x) - x).square().mean()
    loss.backward()
    dist.barrier()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    dist.barrier()
    plan = loka_compile.plan_of(model)
    fp8.append([d for d in ("fwd", "dgrad", "wgrad") if plan.sites["0"].choice(d).is_fp8])
print(json.dumps({
    "fp8": fp8,
    "losses": losses,
    "digest": plan.digest(),
    "reason": plan.sites["0"].choice("fwd").reason,
    "sources": sorted({c.source for s in plan.sites.values() for c in s.directions.values()}),
}))
dist.destroy_process_group()
"""


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
def test_two_processes_run_one_plan_again_after_a_failure(tmp_path) -> None:
    (a, log), (b, _) = run_both(tmp_path, WORKER)
    assert a["digest"] == b["digest"]
    assert a["fp8"][1] == b["fp8"][1] == ["fwd", "dgrad", "wgrad"]
    # Rank 1 fails in its third step; the word is there before the optimizer steps, on both.
    assert a["fp8"][2] == b["fp8"][2] == ["dgrad", "wgrad"]
    # The same the other way round, and in a backward.
    assert a["fp8"][-1] == b["fp8"][-1] == ["dgrad"]
    assert "rank 1: RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED in the fwd" in a["reason"]
    assert a["reason"] == b["reason"]
    assert "on rank 1" in log
    assert all(map(math.isfinite, a["losses"] + b["losses"]))


#: No torch.optim, a checkpoint around the model, and compiled code in which an opaque op fails.
BY_HAND = r"""
import json, sys
import torch, torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
import loka_compile
from loka_compile import failure_board, loka_backend
from loka_compile.lowering.libraries import LIBRARIES, opaque
from loka_compile.lowering.libraries.base import Library
from loka_compile.lowering.recipes import ROWWISE

folder, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
failure_board.EVERY = 0.0
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

broken = set()

def run_scaled(a, a_scale, b, b_scale, forward, dtype):
    if forward in broken:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
    return ((a.float() * a_scale) @ (b.float() * b_scale).t()).to(dtype)

opaque.define("standin", "bool forward, ScalarType dtype", run_scaled, lambda _, dtype: dtype)

class StandIn(Library):
    name, distribution, recipes = "standin", "torch", {"rowwise": ROWWISE}

    def why_unavailable(self, device):
        return None

    def call(self, a, a_scale, b, b_scale, gemm, out_dtype):
        return torch.ops.loka.standin(a, a_scale, b, b_scale, gemm.fast_accum, out_dtype)

LIBRARIES["standin"] = StandIn()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
options = {"mods": "off", "inner": "aot_eager", "heads": (), "force": {"*": "standin:rowwise"}}
run = torch.compile(model, backend=loka_backend, options=options)
looks, look = [], failure_board.Board.look
failure_board.Board.look = lambda self: looks.append(len(failure_board.PENDING)) or look(self)
fp8 = []
for step in range(7):
    if rank == 1 and step == 2:
        broken.add(True)
    if rank == 0 and step == 4:
        broken.add(False)
    x = torch.randn(64, 32)
    loss = (checkpoint(run, x, use_reentrant=False) - x).square().mean()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad
    model.zero_grad()
    assert loss.isfinite()
    dist.barrier()
    plan = loka_compile.plan_of(model)
    fp8.append([d for d in ("fwd", "dgrad", "wgrad") if plan.sites["0"].choice(d).is_fp8])
print(json.dumps({"fp8": fp8, "digest": plan.digest(), "pending": len(failure_board.PENDING)}))
dist.destroy_process_group()
"""


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
def test_loops_without_torch_optim_hear_it_at_their_next_forward(tmp_path) -> None:
    (a, log), (b, _) = run_both(tmp_path, BY_HAND)
    every, backward = ["fwd", "dgrad", "wgrad"], ["dgrad", "wgrad"]
    # Rank 1 fails in its third step, rank 0 in its fifth; the other follows one step later.
    assert b["fp8"] == [every, every, backward, backward, backward, [], []]
    assert a["fp8"] == [every, every, every, backward, [], [], []]
    assert a["digest"] == b["digest"] and a["pending"] == b["pending"] == 0
    assert "in high precision here too" in log
