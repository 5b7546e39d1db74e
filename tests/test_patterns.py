"""The pattern API: worked examples, registration, scope, order, cache key, and the report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from worked_patterns import EXAMPLES
from worked_patterns import Cross
from worked_patterns import Two
from worked_patterns import cross
from worked_patterns import records
from worked_patterns import two_linears

import loka_compile
from loka_compile import loka_backend
from loka_compile.user_patterns import Pattern


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("pattern", "model", "width", "count"), EXAMPLES)
def test_example_checks_and_trains(pattern, model, width, count, agrees):
    seen = loka_compile.check_pattern(pattern)
    assert seen.matches == 1 and seen.max_error < 1e-4 and seen.before != seen.after
    with loka_compile.explain() as report:
        agrees(model(), torch.randn(6, 3, width), options={"patterns": [pattern]})
    (record,) = records(report, pattern.name)
    assert len(record.rewrites) == count and not record.error


@pytest.mark.parametrize(("pattern", "model", "width", "count"), EXAMPLES)
def test_example_in_fp8(pattern, model, width, count, agrees):
    """Ten steps: probed, planned, and swapped; merged GEMMs have no site and stay high."""
    agrees(model(), torch.randn(32, width), fp8=True, options={"patterns": [pattern]})


def test_inside_a_checkpoint(agrees):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cross = Cross()

        def forward(self, x):
            return checkpoint(self.cross, x, use_reentrant=False)

    with loka_compile.explain() as report:
        agrees(Checkpointed(), torch.randn(6, 32), options={"patterns": [cross]})
    assert records(report, "cross")[0].matches == 2


def test_a_site_that_is_gone_is_told(agrees):
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.two = nn.Linear(16, 16), Two()

        def forward(self, x):
            return self.two(self.up(x))

    with loka_compile.explain() as report:
        agrees(Both(), torch.randn(16, 16), fp8=True, options={"patterns": [two_linears]})
    (note,) = records(report, "two_linears")[0].refusals
    assert "(in place of two.a, two.b): no site, high precision" in note.what


def test_examples_of_the_document():
    document = (Path(__file__).parents[1] / "docs" / "patterns.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", document, flags=re.M | re.S)
    found: dict = {}
    for block in blocks:
        if "@loka_compile" in block:
            exec(block, found)
    made = [one for one in found.values() if isinstance(one, Pattern)]
    assert [one.name for one in made] == [
        "cross",
        "layer_norm",
        "grouped",
        "two_linears",
        "ensemble",
    ]
    for one in made:
        assert loka_compile.check_pattern(one).matches == 1


def test_the_documents_first_steps_print_what_they_say(capsys):
    """As a newcomer types them, with a compiler that takes less time."""
    document = (Path(__file__).parents[1] / "docs" / "patterns.md").read_text(encoding="utf-8")
    first, second = re.findall(r"^```python\n(.*?)^```", document, flags=re.M | re.S)[:2]
    found: dict = {}
    exec(first, found)
    assert capsys.readouterr().out == "1\n"
    exec(second.replace('options = {"', 'options = {"inner": "aot_eager", "'), found)
    printed = capsys.readouterr().out.rstrip().splitlines()
    said = re.search(r"among them: (.*)", second)
    assert said is not None
    assert said[1] in printed
    (why,) = [line for line in printed if line.startswith("w.0: a linear of M=32, K=16, N=64")]
    assert "Rewritten there: cross: 3 nodes replaced" in why
    assert sum("torch.addcmul" in line for line in printed if line.startswith("+")) == 3
    assert printed[-1] == "[]"


@pytest.mark.parametrize("mods", ["on", "off"])
def test_dynamic_batch_and_autocast(mods):
    model = Cross()
    options = {"inner": "aot_eager", "mods": mods, "patterns": [cross]}
    compiled = torch.compile(model, backend=loka_backend, options=options, dynamic=True)
    plain = torch.compile(
        model, backend=loka_backend, options={**options, "patterns": []}, dynamic=True
    )
    for size in (4, 7):
        x = torch.randn(size, 32)
        torch.testing.assert_close(compiled(x), plain(x))
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(compiled(x), plain(x), rtol=2e-2, atol=2e-2)


def test_when_is_a_near_miss_with_its_reason():
    options = {"inner": "eager", "mods": "off", "patterns": [cross]}
    compiled = torch.compile(Cross(24), backend=loka_backend, options=options)
    with loka_compile.explain() as report:
        compiled(torch.randn(4, 24))
    (record,) = records(report, "cross")
    assert not record.matches
    assert {n.what for n in record.refusals} == {"out_features not a multiple of 16"}
    assert record.refusals[0].line.startswith("worked_patterns.py:")
