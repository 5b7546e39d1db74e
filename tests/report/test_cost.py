"""What `explain` costs while nobody asks: no text is made, and a warm step runs no line of it."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import loka_compile
from loka_compile import loka_backend
from loka_compile.passes import manager
from loka_compile.report import dump

OPTIONS = {"inner": "aot_eager", "mods": "on", "emulate": True, "force": {"*": "torch:rowwise"}}


@pytest.fixture(autouse=True)
def no_trace(monkeypatch):
    """pytest puts handlers of its own on every logger that does not propagate: torch's trace."""
    monkeypatch.setattr(dump, "_TRACE", logging.Logger("no trace"))


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 32))
    yield torch.compile(model, backend=loka_backend, options=OPTIONS)
    torch._dynamo.reset()


def step(compiled) -> None:
    compiled(torch.ones(32, 32)).sum().backward()


def calls_of(compiled) -> Counter[str]:
    """Our own Python functions that one step calls, by file and name."""
    found: Counter[str] = Counter()
    ours = str(Path(loka_compile.__file__).parent)

    def look(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ours):
            found[f"{Path(code.co_filename).relative_to(ours)}:{code.co_name}"] += 1

    sys.setprofile(look)
    try:
        step(compiled)
    finally:
        sys.setprofile(None)
    return found


def test_a_warm_step_runs_no_line_of_the_report(compiled):
    for _ in range(10):
        step(compiled)
    before = calls_of(compiled)
    assert any(name.startswith("runtime.py:") for name in before)
    assert not any(name.startswith("report/") for name in before)
    with loka_compile.explain() as report:
        step(compiled)
    assert report.sites
    step(compiled)
    assert calls_of(compiled) == before
    # A report that is still held is no open one.
    assert report.text() and calls_of(compiled) == before


def test_no_graph_is_written_out_unless_a_diff_is_asked_for(compiled, monkeypatch):
    written = []
    text_of = manager.text_of
    monkeypatch.setattr(manager, "text_of", lambda gm: written.append(gm) or text_of(gm))
    for _ in range(10):
        step(compiled)
    with loka_compile.explain() as report:
        step(compiled)
    assert report.text() and report.why("0") and not written
    assert report.diff("strip_bias") and written
