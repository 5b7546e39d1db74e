"""Many batch sizes: one graph, the plan's kernels in it, no guard on the batch, no recompile."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import loka_compile
from loka_compile import _compat
from loka_compile import planner
from loka_compile import variant

OPTIONS = {
    "emulate": True,
    "inner": "aot_eager",
    "mods": "on",
    "probe_every": 0,
    "recipes": ("rowwise",),
    "libraries": ("loka", "torch"),
}
SIZES = [2 + (17 * i) % 49 for i in range(49)]


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_fifty_batch_sizes_are_one_graph(inner, monkeypatch):
    """Inductor asks more of sizes than the graph does: of a scatter, whether it covers all."""
    added: list[int] = []
    late = variant.build

    def counted(source, decided, options, *, inputs=None):
        before = _compat.count_guards(source.fake_mode)
        built = late(source, decided, options, inputs=inputs)
        if inputs is None:
            added.append(_compat.count_guards(source.fake_mode) - before)
        return built

    monkeypatch.setattr(variant, "build", counted)
    torch._dynamo.reset()
    model = nn.Sequential(
        nn.Linear(32, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 48), nn.LayerNorm(48),
        nn.SiLU(), nn.Linear(48, 32),
    )  # fmt: skip
    options = {**OPTIONS, "inner": inner}
    compiled = torch.compile(model, backend="loka", options=options, dynamic=True)
    before = _graphs()

    def step(rows: int) -> torch.Tensor:
        y = compiled(torch.randn(rows, 32))
        y.square().mean().backward()
        return y

    for rows in SIZES:
        # Probing, the swap and the plan, each at sizes of its own.
        assert step(rows).shape == (rows, 32)
    assert _graphs() - before == 1
    # The variant with the plan's kernels came late, and nothing in it hangs on the batch.
    assert loka_compile.plan_of(model).active and added and not any(added)
    kernels = {k for s in loka_compile.plan_of(model).sites.values() for k in s.kernels}
    assert any(k != "high_precision" for k in kernels)
    # Dynamo itself makes a graph of its own for a size of 1, once.
    for rows in (1, 1, 50, 1):
        step(rows)
    assert _graphs() - before == 2
    assert sorted({*SIZES, 1}) == list(range(1, 51))


@pytest.mark.parametrize(("dynamic", "marked"), [(None, False), (None, True), (False, False)])
def test_no_more_graphs_than_the_inner_compiler_alone(dynamic, marked):
    def graphs(backend: str, **options: object) -> int:
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.SiLU(), nn.Linear(48, 32))
        compiled = torch.compile(model, backend=backend, dynamic=dynamic, **options)
        before = _graphs()
        # The plan comes at the ninth of these, where one graph serves them.
        for rows in [*range(5, 17), 1]:
            x = torch.randn(rows, 32)
            if marked and rows > 1:
                torch._dynamo.mark_dynamic(x, 0)
            compiled(x).square().mean().backward()
        if backend == "loka":
            assert loka_compile.plan_of(model).active == (dynamic is None)
        return _graphs() - before

    assert graphs("loka", options=OPTIONS) == graphs("aot_eager")


def test_graphs_of_single_batch_sizes_share_what_was_probed(monkeypatch):
    """dynamic=False: a graph per size, of the same parameters, and one plan after eight steps."""
    built: list[str] = []
    made: list[int] = []
    build, decide = variant.build, planner.decide

    def counted(source, decided, options, *, inputs=None):
        built.append("observed" if decided.observed else "planned")
        return build(source, decided, options, inputs=inputs)

    def decided_at(*args, **kwargs):
        made.append(step)
        return decide(*args, **kwargs)

    monkeypatch.setattr(variant, "build", counted)
    monkeypatch.setattr(planner, "decide", decided_at)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))
    compiled = torch.compile(model, backend="loka", options=OPTIONS, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=16):
        for step in range(1, 26):
            compiled(torch.randn(16 + step % 10, 32)).square().mean().backward()
    # Ten sizes: the ninth and the tenth graph were new when the plan came.
    assert made == [9]
    assert loka_compile.plan_of(model).active
    assert built.count("planned") == 10 and built.count("observed") <= 10
