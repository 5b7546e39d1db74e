"""Rows of a site's input and of its gradient stay pairs, in whatever order gradients come."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch import nn

from loka_compile import loka_backend
from loka_compile.ledger import LEDGER
from loka_compile.lowering import gate
from loka_compile.options import Options
from loka_compile.probe import observers
from loka_compile.probe import quantify as qt
from loka_compile.probe import store
from loka_compile.probe.forwards import Forward
from loka_compile.probe.places import Places
from loka_compile.probe.statistics import RESERVOIR
from loka_compile.probe.statistics import Statistics

OPTIONS = {"inner": "aot_eager", "emulate": True, "mods": "off", "heads": ()}


class Site:
    """One site whose forwards and backwards a test orders: row i of both is the number of i."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.x = Statistics.empty(3, torch.float32, device)
        self.g = Statistics.empty(2, torch.float32, device, gradient=True)
        self.places = Places([self.x, self.g], device)
        self.rows = 0

    def forward(self, m: int, *, again: bool = False) -> tuple[Forward, Tensor]:
        ids = torch.arange(self.rows, self.rows + m, dtype=torch.float32, device=self.device)
        self.rows += m
        token, _ = self.places.starts(again=again, replayed=False)
        cells, order, _ = self.places.tensors
        with observers.forward_of(token, again=again):
            torch.ops.loka.observe(ids.unsqueeze(1).expand(-1, 3).contiguous(), cells[0], order)
        return token, ids

    def backward(self, token: Forward, ids: Tensor) -> None:
        self.places.goes_through(token)
        cells, _, order = self.places.tensors
        torch.ops.loka.observe(ids.unsqueeze(1).expand(-1, 2).contiguous(), cells[1], order)

    def pairs(self) -> int:
        """How many there are; all of them are right."""
        rows_x, rows_g = qt._paired(self.x, self.g, torch.float32)
        assert torch.equal(rows_x[:, 0], rows_g[:, 0])
        return len(rows_x)


@pytest.fixture
def site(device: torch.device) -> Site:
    return Site(device)


def test_the_last_forward_comes_back_first(site: Site) -> None:
    for step in range(30):
        done = [site.forward(40 + step), site.forward(7 + step)]
        for one in reversed(done):
            site.backward(*one)
    assert site.pairs() == RESERVOIR
    assert site.x.batches == site.g.batches == 60
    assert site.g.scalars[3] == site.x.scalars[3]


def test_after_it_plain_steps_go_on_as_ever(site: Site) -> None:
    done = [site.forward(40), site.forward(50)]
    for one in reversed(done):
        site.backward(*one)
    pairing = site.g.pairing
    for _ in range(20):
        token, ids = site.forward(64)
        assert pairing.follows(token.seen[pairing][-1])
        site.backward(token, ids)
    assert site.pairs() == RESERVOIR and not pairing.open


def test_a_forward_without_a_backward(site: Site) -> None:
    for step in range(20):
        site.backward(*site.forward(33))
        if step % 3 == 0:
            site.forward(12)
        assert site.pairs() > 0
    assert site.pairs() > RESERVOIR // 2


def test_first_forwards_without_a_backward(site: Site) -> None:
    site.forward(12)
    site.forward(40)
    site.backward(*site.forward(33))
    assert site.pairs() == 32


@pytest.mark.parametrize("first", [0, 3])
def test_after_a_missing_gradient_the_next_take_the_short_way(
    site: Site, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    from loka_compile.probe import pairing

    for _ in range(first):
        site.backward(*site.forward(33))
    site.forward(12)
    monkeypatch.setattr(pairing, "_apart", None)
    for step in range(20):
        site.backward(*site.forward(20 + step))
        assert site.pairs() > 0
        assert site.g.scalars[3] == site.x.scalars[3]
    # What the one without a gradient left is not among them.
    assert RESERVOIR - 12 <= site.pairs() <= RESERVOIR
    assert site.g.batches == site.x.batches - 1


def test_a_backward_that_comes_twice(site: Site) -> None:
    for _ in range(12):
        one = site.forward(33)
        site.backward(*one)
        site.backward(*one)
    assert site.pairs() > RESERVOIR // 2
    assert site.g.batches == 24


def test_a_checkpoints_second_forward_is_none(site: Site) -> None:
    for _ in range(10):
        one = site.forward(33)
        site.forward(33, again=True)
        site.backward(*one)
    assert site.pairs() == RESERVOIR and site.x.batches == 10


def test_any_order(site: Site) -> None:
    draw = random.Random(0)
    waiting: list[tuple[Forward, Tensor]] = []
    for _ in range(200):
        if waiting and draw.random() < 0.5:
            one = waiting.pop(draw.randrange(len(waiting)))
            if draw.random() < 0.9:
                site.backward(*one)
        else:
            waiting.append(site.forward(draw.choice((1, 5, 32, 90))))
        site.pairs()
    del waiting
    assert site.pairs() > 0


def test_what_is_waited_for_is_bounded(site: Site) -> None:
    held = [site.forward(8) for _ in range(200)]
    assert len(site.g.pairing.open) <= 65
    for one in held:
        site.backward(*one)
    site.pairs()


def test_rows_that_are_left_out_are_left_out_of_both(site: Site) -> None:
    from loka_compile import probe_rows

    mask = torch.arange(40, device=site.device) % 2 == 0
    with probe_rows(mask):
        done = [site.forward(40), site.forward(40)]
        for one in reversed(done):
            site.backward(*one)
    rows, _ = qt._paired(site.x, site.g, torch.float32)
    assert site.pairs() and not (rows[:, 0] % 2).any()


def test_no_rows(site: Site) -> None:
    done = [site.forward(0), site.forward(5)]
    for one in reversed(done):
        site.backward(*one)
    assert site.pairs() == 5


# -- models ---------------------------------------------------------------------------------------


def numbered(first: int, m: int) -> Tensor:
    x = torch.randn(m, 16)
    x[:, 0] = torch.arange(first, first + m)
    return x


def loss(y: Tensor, x: Tensor) -> Tensor:
    """Every entry of row i's gradient is the number of row i."""
    return (y * x[:, :1]).sum()


def check(layer: nn.Linear, least: int) -> None:
    held = LEDGER.find(layer.weight).statistics
    x, g = qt._paired(held[0, "x"], held[0, "g"], torch.float32)
    assert len(x) >= least
    assert torch.equal(x[:, 0], g[:, 0])


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("sizes", [(24, 24), (40, 9, 24)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_several_forwards_in_one_loss(inner: str, sizes: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    layer = nn.Linear(16, 16)
    options = {**OPTIONS, "inner": inner, "probe_every": 1, "max_mere": 1e-9}
    run = torch.compile(layer, backend=loka_backend, options=options, dynamic=True)
    first = 0
    for _ in range(8):
        xs = []
        for m in sizes:
            xs.append(numbered(first, m))
            first += m
        sum(loss(run(x), x) for x in xs).backward()
        check(layer, 9)
    x, g = (LEDGER.find(layer.weight).statistics[0, role] for role in "xg")
    assert x.batches == g.batches >= 8


def test_one_loss_after_the_other_and_an_evaluation_with_gradients() -> None:
    torch._dynamo.reset()
    layer = nn.Linear(16, 16)
    run = torch.compile(layer, backend=loka_backend, options=OPTIONS)
    for step in range(4):
        a, b = numbered(100 * step, 24), numbered(100 * step + 50, 24)
        ya, yb = run(a), run(b)
        loss(ya, a).backward()
        if step != 2:
            loss(yb, b).backward()
        del ya, yb
        check(layer, 24)


def test_where_cuda_graphs_replay_it_is_said_and_wgrad_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path
) -> None:
    """Replays ask no observer, so that nobody can say whose rows are recorded."""
    import loka_compile

    monkeypatch.setattr(Options, "records_graphs", True)
    torch._dynamo.reset()
    layer, other = nn.Linear(16, 16), nn.Linear(16, 16)
    run = torch.compile(layer, backend=loka_backend, options=OPTIONS)
    in_turn = torch.compile(other, backend=loka_backend, options=OPTIONS)
    for step in range(10):
        a, b = numbered(100 * step, 24), numbered(100 * step + 50, 24)
        (loss(run(a), a) + loss(run(b), b)).backward()
        loss(in_turn(a), a).backward()
        loss(in_turn(b), b).backward()
    assert caplog.text.count("cannot tell") == 1
    (plan,) = loka_compile.plan_of(layer).sites.values()
    (same,) = loka_compile.plan_of(other).sites.values()
    assert not plan.directions["wgrad"].is_low and plan.directions["dgrad"].is_low
    assert "different orders" in plan.directions["wgrad"].reason
    assert "different orders" not in same.directions["wgrad"].reason
    # Known to what is saved, too.
    held = LEDGER.find(layer.weight).statistics
    state = {("layer", role): held[0, role] for role in "xg"}
    loaded = store.load(store.save(state, tmp_path / "state.safetensors", rows=True))
    for gy in (held[0, "g"], loaded["layer", "g"]):
        errors = qt.quantify(
            "wgrad", "torch:rowwise+emulated", layer.weight, held[0, "x"], gy, torch.float32
        )
        why = gate.why_refused(errors, "robust", 0.2)
        assert errors.samples == 0 and "different orders" in why
