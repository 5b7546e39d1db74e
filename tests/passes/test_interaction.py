"""Products of a factorisation machine become one op; value and gradients unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loka_compile.lowering import interaction as op
from loka_compile.names import find_sites
from loka_compile.options import Options
from loka_compile.passes import graph as g
from loka_compile.passes.batched_linear import BatchedLinear
from loka_compile.passes.canonicalize import Canonicalize
from loka_compile.passes.dispatch import Dispatch
from loka_compile.passes.interaction import Interaction
from loka_compile.passes.interaction import would_join
from loka_compile.passes.manager import PassContext
from loka_compile.passes.manager import run_pass
from loka_compile.passes.observe import Observe


class Machine(nn.Module):
    """(B, n, d): `form` says how the products are written."""

    def __init__(self, form, n: int = 6, k: int = 3, m: int = 4) -> None:
        super().__init__()
        self.projection = nn.Parameter(torch.randn(n, k, dtype=torch.float64))
        self.linear = nn.Linear(n, m, bias=False, dtype=torch.float64)
        self.form = form

    def products(self, x):
        return torch.bmm(x, x.permute(0, 2, 1) @ self.projection)

    def compress(self, x):
        return self.linear(x.permute(0, 2, 1)).permute(0, 2, 1)

    def forward(self, x):
        return self.form(self, x)


def both(s, x):
    return torch.cat([s.products(x).flatten(1), s.compress(x).flatten(1)], 1)


def compression_first(s, x):
    c = s.compress(x) * 2
    return torch.cat([c.flatten(1), (x @ (x.mT @ s.projection)).flatten(1)], 1)


def machine_only(s, x):
    return s.products(x).relu()


def with_other_readers(s, x):
    return both(s, x).sum(1) + x.square().sum((1, 2)) + s.linear(x.mT).sum((1, 2))


FORMS = [both, compression_first, machine_only, with_other_readers]


def inner_product_is_read_twice(s, x):
    t = x.permute(0, 2, 1) @ s.projection
    return torch.bmm(x, t).sum() + t.sum()


def x_changes_in_between(s, x):
    y = x * 1
    t = y.permute(0, 2, 1) @ s.projection
    y.add_(1)
    return torch.bmm(y, t)


def another_x(s, x):
    return torch.bmm(x + 1, x.permute(0, 2, 1) @ s.projection)


LEFT = [inner_product_is_read_twice, x_changes_in_between, another_x]


def rewritten(model):
    kept = []

    def backend(gm, example_inputs):
        mine = g.own_copy(gm)
        context = PassContext(Options())
        passes = (Canonicalize(), Dispatch({}), Interaction(("cpu",)), BatchedLinear(("cpu",)))
        records = [run_pass(one, mine, context) for one in passes]
        kept.append((mine, records[2]))
        return mine

    torch._dynamo.reset()
    return torch.compile(model, backend=backend), kept


@pytest.fixture(autouse=True)
def any_dtype(monkeypatch):
    """The plain-torch form of the op takes FP64, in which equality is sharp."""
    monkeypatch.setattr(op, "DTYPES", (torch.float64,))


def calls(gm) -> int:
    return sum(g.is_call(n, op.INTERACTION) for n in gm.graph.nodes)


def check(model, compiled, x) -> None:
    y, want = compiled(x), model(x)
    torch.testing.assert_close(y, want)
    leaves = [x, *model.parameters()]
    grad = torch.randn_like(want)
    mine = torch.autograd.grad(y, leaves, grad, allow_unused=True)
    theirs = torch.autograd.grad(want, leaves, grad, allow_unused=True)
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dynamic", [False, True])
def test_values_and_gradients(form, dynamic: bool) -> None:
    model = Machine(form)
    x = torch.randn(5, 6, 7, dtype=torch.float64, requires_grad=True)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    compiled, kept = rewritten(model)
    check(model, compiled, x)
    (gm, record), *_ = kept
    assert calls(gm) == 1 and len(record.rewrites) == 1
    assert ("compression" in record.rewrites[0].what) == (form is not machine_only)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("form", LEFT, ids=lambda f: f.__name__)
def test_left_alone(form) -> None:
    model = Machine(form)
    x = torch.randn(5, 6, 7, dtype=torch.float64, requires_grad=True)
    compiled, kept = rewritten(model)
    if form is x_changes_in_between:
        # Autograd refuses it in eager, too.
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
    else:
        check(model, compiled, x)
    assert calls(kept[0][0]) == 0


@pytest.mark.parametrize("form", [*FORMS, *LEFT], ids=lambda f: f.__name__)
def test_what_would_join_is_known_while_it_is_observed(form) -> None:
    """Whoever decides about these linears hears of it, whatever kernels they have."""
    kept = []

    def backend(gm, example_inputs):
        mine = g.own_copy(gm)
        context = PassContext(Options(emulate=True))
        run_pass(Canonicalize(), mine, context)
        names = [site.name for site in find_sites(mine, example_inputs)]
        plan = dict.fromkeys(names, ("torch:rowwise+emulated",) * 3)
        copy = g.own_copy(mine)
        run_pass(Dispatch(plan), copy, context)
        run_pass(Observe(frozenset(names)), copy, context)
        linears = would_join(copy, ("cpu",))
        assert would_join(copy) == []  # for another device
        run_pass(Dispatch({}), mine, context)
        run_pass(Interaction(("cpu",)), mine, context)
        kept.append((calls(mine), sorted(str(n.meta[g.SITE]) for n in linears)))
        return gm

    torch._dynamo.reset()
    x = torch.randn(5, 6, 7, dtype=torch.float64)
    with torch.no_grad():
        torch.compile(Machine(form), backend=backend)(x)
    ((joined, names),) = kept
    assert bool(names) == bool(joined) == (form in FORMS)
    assert len(names) == (0 if form in LEFT else 1 if form is machine_only else 2), names


def test_a_refusal_says_why(monkeypatch) -> None:
    monkeypatch.setattr(op, "WIDEST", 4)
    compiled, kept = rewritten(Machine(both))
    compiled(torch.randn(5, 6, 7, dtype=torch.float64))
    (gm, record), *_ = kept
    assert calls(gm) == 0
    assert "6 x 7" in record.refusals[0].what


def test_only_where_the_products_stay_in_high_precision() -> None:
    """A kernel named for the inner product keeps it a linear of its own."""
    model = Machine(machine_only)
    model.projection = nn.Parameter(torch.randn(32, 16))
    x = torch.randn(4, 32, 16)
    kept = []

    def backend(gm, example_inputs):
        mine = g.own_copy(gm)
        context = PassContext(Options(emulate=True))
        run_pass(Canonicalize(), mine, context)
        (site,) = find_sites(mine, example_inputs)
        high = "high_precision"
        for fwd in ("torch:rowwise+emulated", high):
            copy = g.own_copy(mine)
            run_pass(Dispatch({site.name: (fwd, high, high)}), copy, context)
            run_pass(Interaction(("cpu",)), copy, context)
            kept.append(calls(copy))
        return mine

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "DTYPES", (torch.float32,))
        torch.compile(model, backend=backend)(x)
    assert kept == [0, 1]
