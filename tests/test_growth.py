"""What a process holds does not grow with the models that it has compiled."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor
from torch import nn

from loka_compile import loka_backend
from loka_compile.probe.session import Session
from loka_compile.probe.session import sessions

OPTIONS = {"inner": "eager", "emulate": True, "heads": (), "force": {"*": "torch:rowwise"}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.functional.silu(self.norm(self.a(x))))


def stores() -> Iterator[tuple[str, int]]:
    """Everything of ours that lives as long as the process, and how much is in it."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("loka_compile"):
            continue
        for key, value in list(vars(module).items()):
            if key.startswith("__"):
                continue
            if isinstance(value, functools._lru_cache_wrapper):
                yield f"{name}.{key}", value.cache_info().currsize
            else:
                yield from _sizes(f"{name}.{key}", value)
    for number, session in enumerate(sessions()):
        yield from _sizes(f"session {number}", session)
        yield from _sizes(f"drift {number}", session.drift)


_KINDS = (dict, list, set, weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)


def _sizes(name: str, value: object) -> Iterator[tuple[str, int]]:
    if isinstance(value, _KINDS):
        yield name, len(value)
    elif type(value).__module__.startswith("loka_compile") and hasattr(value, "__dict__"):
        for key, part in vars(value).items():
            if isinstance(part, _KINDS):
                yield f"{name}.{key}", len(part)


def objects() -> int:
    """Live ones of our classes, and graphs."""
    gc.collect()
    return sum(
        str(type(one).__module__).startswith("loka_compile") or type(one) is torch.fx.Graph
        for one in gc.get_objects()
    )


def test_thirty_models_leave_no_more_than_ten() -> None:
    """With FP8 everywhere, or probed and planned; each with code of its own."""
    watched: list[weakref.ref] = []
    held: list[tuple[dict[str, int], int]] = []
    for number in range(30):
        torch._dynamo.reset()
        model = Net()
        probed = number % 10 == 1
        options = {**OPTIONS, "force": {}} if probed else OPTIONS
        run = torch.compile(model, backend=loka_backend, options={**options, "probe_every": 1})
        for _ in range(12 if probed else 2):
            run(torch.randn(24, 32)).square().sum().backward()
        watched += [weakref.ref(model), weakref.ref(model.a.weight)]
        del model, run
        if number in (9, 29):
            torch._dynamo.reset()
            for _ in range(3):
                # What finalizers let go of is found by the next round.
                gc.collect()
            held.append((dict(stores()), objects()))
    assert not any(ref() is not None for ref in watched)
    (before, few), (after, many) = held
    grown = {k: (before.get(k, 0), n) for k, n in after.items() if n > before.get(k, 0)}
    assert not grown
    assert many <= few


def test_a_session_forgets_models_that_are_gone() -> None:
    from loka_compile.ledger import LEDGER
    from loka_compile.probe.statistics import Statistics

    one = Session()
    for _ in range(20):
        w = nn.Linear(16, 16, bias=False).weight
        entry = LEDGER.entry(w)
        entry.name = "layer"
        entry.statistics[0, "x"] = Statistics.empty(16, torch.float32, torch.device("cpu"))
        for step in range(3):
            entry.statistics[0, "x"].scalars[0] += 1
            entry.statistics[0, "x"].scalars[8:] = 1.0
            one.probed([entry], step)
        del w, entry
        gc.collect()
    assert 0 < len(one._fed) <= 2 and 0 < len(one.drift._series) <= 4
