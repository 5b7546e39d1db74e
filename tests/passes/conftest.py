"""Fixtures of the pass tests: capture a graph through Dynamo, run passes, compare with a reference.

The rewritten graph runs eagerly (every `loka::` op has an eager kernel), so no Inductor is needed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import fx
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from loka_compile.options import Options
from loka_compile.passes import graph as g
from loka_compile.passes import registry
from loka_compile.passes.manager import PassContext
from loka_compile.passes.manager import run_passes
from loka_compile.passes.records import PassRecord

#: Norm of the error over norm of the value: where rounding carries a value over a kink of
#: hardswish, single elements of a gradient differ by half of it. bf16 keeps 8 bits.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@dataclass
class Captured:
    """What one compiled callable went through. Counts are over all graphs and their bodies."""

    before: list[fx.GraphModule] = field(default_factory=list)
    after: list[fx.GraphModule] = field(default_factory=list)
    records: list[PassRecord] = field(default_factory=list)
    run: Any = None

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    def nodes(self, *targets: Any, before: bool = False) -> list[fx.Node]:
        graphs = self.before if before else self.after
        return [
            node
            for gm in graphs
            for one in g.every_graph(gm)
            for node in one.graph.nodes
            if g.is_call(node, *targets)
        ]

    def count(self, *targets: Any, before: bool = False) -> int:
        return len(self.nodes(*targets, before=before))

    def notes(self, kind: str, name: str | None = None) -> list[str]:
        return [
            note.what
            for record in self.records
            if name in (None, record.name)
            for note in getattr(record, kind)
        ]

    def refusals(self, name: str | None = None) -> str:
        return "\n".join(self.notes("refusals", name))


def _name_sites(gm: fx.GraphModule) -> None:
    """Stand-in for the naming step: the module's path, else lin0, lin1, ..."""
    anonymous = 0
    for one in g.every_graph(gm):
        for node in one.graph.nodes:
            if not g.is_call(node, torch._C._nn.linear):
                continue
            if node.meta.get("nn_module_stack"):
                node.meta[g.SITE] = g.layer_of(node)
            else:
                node.meta[g.SITE] = f"lin{anonymous}"
                anonymous += 1


@pytest.fixture
def capture() -> Iterator[Callable[..., Captured]]:
    """capture(fn, passes=None | "mods" | "exact" | [...], heads=(), dynamic=None, aot=False).

    More keywords are options. `aot` runs the result through AOTAutograd, as compilers do.
    """

    def make(
        fn: Callable[..., Any],
        passes: str | Sequence[Any] | None = None,
        *,
        heads: Sequence[str] = (),
        dynamic: bool | None = None,
        aot: bool = False,
        **options: Any,
    ) -> Captured:
        captured = Captured()
        after: Sequence[Any] = passes or ()
        if isinstance(passes, str):
            after = registry.with_mods() if passes == "mods" else registry.without_mods()
        context = PassContext(Options.parse(options), frozenset(heads))

        def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> fx.GraphModule:
            captured.before.append(g.own_copy(gm))
            gm = g.own_copy(gm)
            gm, records = run_passes(registry.PREPARE, gm, context)
            captured.records += records
            _name_sites(gm)
            gm, records = run_passes(after, gm, context)
            captured.records += records
            _check_values(gm)
            captured.after.append(g.own_copy(gm) if aot else gm)
            return aot_eager(gm, example_inputs) if aot else gm

        captured.run = torch.compile(fn, backend=backend, dynamic=dynamic)
        return captured

    torch._dynamo.reset()
    yield make
    torch._dynamo.reset()


def _check_values(gm: fx.GraphModule) -> None:
    """Every call has a fake value, except those that give nothing (setitem, mode switches)."""
    for one in g.every_graph(gm):
        for node in one.graph.nodes:
            if node.op in ("call_function", "call_method") and node.users:
                assert "example_value" in node.meta or "autocast" in str(node.target), node


@dataclass
class Case:
    """How a model is run: input rank, precision, train or eval."""

    shape: tuple[int, ...]
    precision: str
    train: bool

    @property
    def dtype(self) -> torch.dtype:
        return {"fp64": torch.float64, "fp32": torch.float32, "autocast": torch.bfloat16}[
            self.precision
        ]

    def context(self) -> Any:
        if self.precision == "autocast":
            return torch.autocast("cpu", torch.bfloat16)
        return contextlib.nullcontext()


_CASES = [
    Case(shape, precision, train)
    for shape in ((5,), (2, 3))
    for precision in ("fp32", "autocast")
    for train in (True, False)
]


def _label(case: Case) -> str:
    return f"{len(case.shape) + 1}d-{case.precision}-{'train' if case.train else 'eval'}"


@pytest.fixture(params=_CASES, ids=_label)
def case(request: pytest.FixtureRequest) -> Case:
    """Rank x precision x mode, in full."""
    return request.param


@pytest.fixture(params=[_CASES[i] for i in (0, 3, 5, 6)], ids=_label)
def pair(request: pytest.FixtureRequest) -> Case:
    """Four of the eight: every two of rank, precision and mode meet in each of their ways."""
    return request.param


@pytest.fixture(params=[_CASES[0], _CASES[-2]], ids=_label)
def quick(request: pytest.FixtureRequest) -> Case:
    """One plain case and one with autocast and three dimensions, both training."""
    return request.param


@pytest.fixture
def close() -> Callable[..., None]:
    """Same dtype, same shape, close in TOLERANCE of `dtype`."""

    def check(got: Tensor, want: Tensor, dtype: torch.dtype | None = None, what: str = "") -> None:
        assert got.dtype == want.dtype, what
        assert got.shape == want.shape, what
        got, want = got.detach().double(), want.detach().double()
        bound = TOLERANCE[dtype or torch.float32] * max(want.norm().item(), 1e-3)
        error = (got - want).norm().item()
        assert error <= bound, f"{what}: {error:.3g} > {bound:.3g}"

    return check


@pytest.fixture
def agree(close: Callable[..., None]) -> Callable[..., None]:
    """Values and, in training, gradients of `captured` against a plain-torch function."""

    def check(
        captured: Captured,
        model: nn.Module,
        reference: Callable[[nn.Module, Tensor], Tensor],
        case: Case,
        features: int,
    ) -> None:
        wide = torch.float64 if case.precision == "fp64" else torch.float32
        results = []
        for run in (captured.run, lambda x: reference(model, x)):
            torch.manual_seed(7)
            x = torch.randn(*case.shape, features, dtype=wide, requires_grad=case.train)
            model.zero_grad()
            with torch.set_grad_enabled(case.train), case.context():
                y = run(x)
            grads: dict[str, Tensor] = {}
            if case.train:
                direction = torch.randn(y.shape, dtype=torch.float64).to(y.dtype)
                y.backward(direction)
                grads = {"x": x.grad} | {
                    n: p.grad for n, p in model.named_parameters() if p.grad is not None
                }
            results.append((y, copy.deepcopy(grads)))
        (y, grads), (want, want_grads) = results
        close(y, want, case.dtype, "value")
        assert grads.keys() == want_grads.keys()
        for name, grad in grads.items():
            close(grad, want_grads[name], case.dtype, f"gradient of {name}")

    return check
