"""Observers find their state by the address of a cell, and nothing once it is gone."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from loka_compile import loka_backend
from loka_compile.ledger import LEDGER
from loka_compile.options import PROBE_STEPS
from loka_compile.probe import observers  # noqa: F401  (defines the ops)
from loka_compile.probe import places as pl
from loka_compile.probe.places import Places
from loka_compile.probe.session import Session
from loka_compile.probe.statistics import Statistics

CPU = torch.device("cpu")


def three() -> tuple[Places, list[Statistics]]:
    held = [Statistics.empty(4, torch.float32, CPU, gradient=i > 0) for i in range(3)]
    return Places(held, CPU), held


def test_a_view_of_each_cell_leads_to_its_own_state() -> None:
    places, held = three()
    cells, forward, backward = places.tensors
    assert [tuple(t.shape) for t in places.tensors] == list(pl.shapes_of(3))
    torch.ops.loka.observe(torch.ones(5, 4), cells[2], backward)
    torch.ops.loka.observe(torch.ones(5, 4), cells.select(0, 0), forward)
    assert [one.batches for one in held] == [1, 0, 1]
    # What they say they write to stays as it is.
    assert not forward.any() and not backward.any()


def test_one_that_rests_records_nothing() -> None:
    places, held = three()
    cells, _, backward = places.tensors
    x, gy = torch.ones(5, 4), torch.randn(5, 4)
    places.groups[1].rests = True
    for row in (1, 2):
        torch.ops.loka.observe(gy, cells[row], backward)
        torch.ops.loka.observe_coherence(gy.t() @ x, gy, x, cells[row], backward)
    assert [one.batches for one in held] == [0, 0, 1]
    assert held[1].recorded_coherence() is None
    assert held[2].recorded_coherence().shape == (1, 4)


def test_cells_that_are_gone_lead_nowhere() -> None:
    places, held = three()
    cells, forward, _ = places.tensors
    assert pl.at(cells[1]).held is held[1]
    del places
    gc.collect()
    assert pl.at(cells[1]) is None
    torch.ops.loka.observe(torch.ones(5, 4), cells[0], forward)
    assert held[0].batches == 0


def test_copies_lead_there_too_and_orders_may_be_copies() -> None:
    places, held = three()
    cells, forward, _ = places.tensors
    copy = cells.clone()
    torch.ops.loka.observe(torch.ones(5, 4), copy[1], forward)
    torch.ops.loka.observe(torch.ones(5, 4), cells[0], forward.clone())
    assert [one.batches for one in held] == [1, 1, 0]
    del places
    gc.collect()
    torch.ops.loka.observe(torch.ones(5, 4), copy[1], forward)
    assert [one.batches for one in held] == [1, 1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_copy_that_was_rounded_leads_nowhere_and_it_is_said_once(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pl, "_SAID", set())
    many = [three() for _ in range(20)]
    for places, _ in many:
        for row in range(3):
            cell = places.tensors[0].to(dtype)[row]
            for one in (cell, cell.long()):
                torch.ops.loka.observe(torch.ones(5, 4), one, places.tensors[1])
    assert not any(one.batches for _, held in many for one in held)
    assert 1 <= caplog.text.count("saved-tensor hooks") <= 2 and "options=" in caplog.text


def test_numbers_are_told_from_others() -> None:
    numbers = [pl._number(i) for i in range(1000)]
    assert len(set(numbers)) == 1000 and all(map(pl._was_given, numbers))
    assert all(-(1 << 63) <= n < 1 << 63 for n in numbers)
    assert not any(pl._was_given(n ^ 1 << bit) for n in numbers for bit in range(64))
    assert not pl._was_given(0)


def test_places_go_on_only_with_the_very_state() -> None:
    places, held = three()
    assert places.hold(held)
    assert not places.hold(held[::-1]) and not places.hold(held[:2])
    assert not places.hold([*held[:2], Statistics.empty(4, torch.float32, CPU, gradient=True)])


@pytest.mark.gpu
def test_replayed_cuda_graphs_record_every_step_once() -> None:
    """All observers lie in the graphs; each replay records its own batch."""
    torch._dynamo.reset()
    device = torch.device("cuda")
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)]
    model = nn.Sequential(*layers).to(device, torch.bfloat16)
    options = {"mods": "off", "heads": (), "probe_every": 2, "mode": "reduce-overhead"}
    run = torch.compile(model, backend=loka_backend, options=options)
    seen = []
    for number in range(PROBE_STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        x = (number + 1) * torch.ones(32, 64, device=device, dtype=torch.bfloat16)
        model.zero_grad(set_to_none=True)
        run(x).float().square().mean().backward()
        seen.append(float(number + 1))
    for at in (0, 2):
        held = LEDGER.find(model[at].weight).statistics
        assert [held[0, role].batches for role in "xg"] == [PROBE_STEPS] * 2
        assert held[0, "g"].recorded_coherence().shape == (PROBE_STEPS, 64)
    assert LEDGER.find(model[0].weight).statistics[0, "x"].batch_maxima().tolist() == seen


def test_a_model_whose_ids_were_those_of_another_has_state_of_its_own():
    """Weights of dead models give their ids to those of new ones."""
    one, seen, again = Session(), set(), 0
    # What other tests have left, sixty collections would look at again and again.
    gc.freeze()
    try:
        for _ in range(60):
            w = nn.Linear(16, 16, bias=False).weight
            again += id(w) in seen
            seen.add(id(w))
            entry = LEDGER.entry(w)
            entry.name = "layer"
            entry.statistics[0, "x"] = Statistics.empty(16, torch.float32, torch.device("cpu"))
            one.probed([entry], 1)
            assert (len(one.statistics()), len(one.weights())) == (1, 1)
            del w, entry
            gc.collect()
    finally:
        gc.unfreeze()
    assert again
