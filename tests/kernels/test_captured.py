"""What CUDA graphs read is kept as long as one of them may be replayed, and no longer."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from loka_compile import loka_backend
from loka_compile import readers
from loka_compile.kernels import captured

CPU = torch.device("cpu")


@dataclass(eq=False)
class Reader:
    alive: bool = True

    def left(self) -> bool:
        return self.alive


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "CAPTURED", {})
    monkeypatch.setattr(captured, "WATCHERS", [])


def test_a_table_goes_with_the_last_of_its_readers() -> None:
    one, other = Reader(), Reader()
    captured.WATCHERS.append(lambda at: {(1,): one, (2,): other}.get(at))
    captured.keep("table", (1,), CPU)
    captured.keep("table", (2,), CPU)
    captured.keep("table", (2,), CPU)
    captured.keep("unknown", (3,), CPU)
    one.alive = False
    captured.sweep(CPU)
    assert {"table": {other}, "unknown": {None}} == captured.CAPTURED
    other.alive = False
    captured.sweep(CPU)
    assert {"unknown": {None}} == captured.CAPTURED


def test_one_that_somebody_unknown_reads_stays() -> None:
    one = Reader()
    answers = [one, None]
    captured.WATCHERS.append(lambda at: answers.pop(0))
    captured.keep("table", (1,), CPU)
    captured.keep("table", (1,), CPU)
    one.alive = False
    captured.sweep(CPU)
    assert {"table": {None}} == captured.CAPTURED


def test_weights_and_the_code_that_was_compiled_for_them() -> None:
    """Either alone is enough: the user's own graphs go on without the code, the compiler's may run
    with other weights at the same addresses."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    options = {"inner": "eager", "mods": "off", "heads": ()}
    run = torch.compile(model, backend=loka_backend, options=options)
    run(torch.randn(4, 16)).sum().backward()
    addresses = tuple(model[i].weight.data_ptr() for i in (0, 2))
    found = readers.of_weights(addresses)
    assert found == readers.of_weights(addresses) and hash(found) == hash(found)
    assert len(found.storages) == 2 and found.variants
    assert readers.of_weights((*addresses, 1)) is None
    assert found.left()
    only = readers.WeightReaders(frozenset(), found.storages)
    code = readers.WeightReaders(found.variants, frozenset())
    del run
    torch._dynamo.reset()
    gc.collect()
    assert only.left() and found.left() and not code.left()
    gone = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert gone() is None and not only.left() and not found.left()
