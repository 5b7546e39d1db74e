"""Every linear of a model is answered for: as a site, or as left eager."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import loka_compile
from loka_compile import loka_backend
from loka_compile.data.base import CategoricalField
from loka_compile.data.base import HistoryField
from loka_compile.data.base import Schema
from loka_compile.report import saved
from loka_compile.report.coverage import Linear
from loka_compile.report.coverage import left_eager
from loka_compile.report.coverage import linears_of
from loka_compile.zoo import MODELS
from loka_compile.zoo import build_model

OPTIONS = {"inner": "eager", "mods": "off"}


class Broken(nn.Module):
    """A graph break around one linear, one that is never called, one that is disabled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.disabled, self.unused = nn.Linear(8, 24), nn.Linear(3, 5)

    def forward(self, x):
        h = self.second(self.first(x))
        return torch.compiler.disable(self.disabled)(h).sum()


def test_linears_that_no_graph_holds(tmp_path):
    torch._dynamo.reset()
    model = Broken()
    compiled = torch.compile(model, backend=loka_backend, options=OPTIONS)
    with loka_compile.explain(model) as report:
        compiled(torch.randn(4, 8))
    assert report.eager == [Linear("disabled", 8, 24), Linear("unused", 3, 5)]
    assert "left eager by a graph break" in report.why("disabled")
    assert "left eager: 2 (disabled, unused)" in report.summary()
    assert "left eager: 2 (disabled, unused)" in report.text()
    assert "Not fused: the linear is a head" in report.why("second")
    again = saved.load(report.save(tmp_path / "r.json"))
    assert again.text() == report.text() and again.why("unused") == report.why("unused")
    page = report.save(tmp_path / "r.html").read_text()
    assert "<b>2 left eager</b>" in page and ">disabled</span>" in page
    torch._dynamo.reset()


def test_parts_that_are_compiled_by_themselves():
    model = nn.ModuleDict({"tower": nn.Sequential(nn.Linear(4, 6)), "head": nn.Linear(4, 6)})
    linears = linears_of(torch.compile(model, backend="eager"))
    assert [one.name for one in linears] == ["tower.0", "head"]
    site = {"name": "0", "K": 4, "N": 6}
    assert left_eager(linears, [site]) == [Linear("head", 4, 6)]
    assert left_eager(linears, [site, {**site, "K": 5, "name": "head"}])
    assert not left_eager(linears, [site, {**site, "name": "root.head#1"}])


SCHEMA = Schema(
    tuple(CategoricalField(f"c{i}", 5 + i) for i in range(12)),
    tuple(f"x{i}" for i in range(7)),
    "y",
    HistoryField("c2", 6),
)


class Gemms(TorchDispatchMode):
    """Runs a model in eager and keeps the memory that its matrix products read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"):
            self.read.update(a.untyped_storage().data_ptr() for a in args if torch.is_tensor(a))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mods", ["on", "off"])
@pytest.mark.parametrize("name", MODELS)
def test_why_answers_for_every_linear_of_the_zoo(name, mods):
    torch._dynamo.reset()
    dense = build_model(name, "tiny", SCHEMA).dense
    inputs = build_model(name, "tiny", SCHEMA).example_inputs(32)
    with Gemms() as gemms, torch.no_grad():
        dense(*inputs)
    options = {"inner": "aot_eager", "mods": mods}
    with loka_compile.explain(dense) as report:
        torch.compile(dense, backend=loka_backend, options=options)(*inputs)
    assert report.eager == []
    named = [n for n, m in dense.named_modules() if isinstance(m, nn.Linear)]
    storages = {n: p.untyped_storage().data_ptr() for n, p in dense.named_parameters()}
    named += [n for n, at in storages.items() if at in gemms.read and not n.endswith(".bias")]
    assert len(named) >= 8
    for one in named:
        told = report.why(one)
        assert re.match(r"\S+: a linear of M=\d+, K=\d+, N=\d+ in float32", told), told
        fused = re.search(r"Fused as (\S+)\.|Not fused: (.+?)\.", told)
        assert fused is not None and len(fused[1] or fused[2]) > 8, told
        assert told.count("high precision, because ") and "no reason recorded" not in told, told
    sites = {s["name"] for s in report.sites}
    answered = {report.why(one).partition(":")[0] for one in named}
    # And the other way: no site of the report is the answer to nothing.
    assert answered == sites
    torch._dynamo.reset()
