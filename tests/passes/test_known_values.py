"""A fake value that is known by its form is what the op gives, in memory of its own."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.experimental.symbolic_shapes import StatelessSymbolicContext
from torch.nn import functional as F

from loka_compile.lowering import ops
from loka_compile.passes import known_values

NORM = torch.ops.loka.block_norm.default


@pytest.fixture
def calls():
    """(fake op, what it was asked for)."""
    seen = []

    def function(*args):
        seen.append(args)
        return ops.DIRECT[NORM](*args)

    return function, seen


def fake(mode, *shape, dtype=torch.float32, grad=False):
    with mode:
        return torch.empty(shape, dtype=dtype).requires_grad_(grad)


def same_form(a, b):
    return all(getattr(a, what) == getattr(b, what) for what in ("shape", "dtype", "device")) and (
        a.stride(),
        a.requires_grad,
        a.fake_mode,
    ) == (b.stride(), b.requires_grad, b.fake_mode)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [False, True])
def test_the_second_of_a_form_is_not_computed(dtype, grad, calls):
    function, seen = calls
    mode = FakeTensorMode()
    results = []
    for _ in range(3):
        x, gain = fake(mode, 4, 512, dtype=dtype, grad=grad), fake(mode, 512, dtype=dtype)
        results.append(known_values.result_of(NORM, function, (x, gain, 256, 1e-5)))
    assert len(seen) == 1
    for result in results[1:]:
        assert type(result) is tuple
        assert all(map(same_form, result, results[0]))
    held = [t.untyped_storage()._cdata for result in results for t in result]
    assert len(set(held)) == len(held)


def test_whatever_differs_is_computed(calls):
    function, seen = calls
    mode, other = FakeTensorMode(), FakeTensorMode()
    gain = fake(mode, 512)
    cases = [
        (fake(mode, 4, 512), gain, 256, 1e-5),
        (fake(mode, 5, 512), gain, 256, 1e-5),
        (fake(mode, 4, 512).double(), gain, 256, 1e-5),
        (fake(mode, 4, 512, grad=True), gain, 256, 1e-5),
        (fake(mode, 512, 4).t(), gain, 256, 1e-5),
        (fake(mode, 4, 512), None, 256, 1e-5),
        (fake(mode, 4, 512), gain, 128, 1e-5),
        (fake(other, 4, 512), fake(other, 512), 256, 1e-5),
    ]
    for args in cases:
        got = known_values.result_of(NORM, function, args)
        assert all(map(same_form, got, ops.DIRECT[NORM](*args)))
    with torch.no_grad():
        known_values.result_of(NORM, function, cases[3])
    assert len(seen) == len(cases) + 1


def test_symbolic_sizes_are_always_computed(calls):
    function, seen = calls
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.randn(4, 512), symbolic_context=dynamic)
    assert not isinstance(x.shape[0], int)
    for _ in range(2):
        known_values.result_of(NORM, function, (x, None, 256, 1e-5))
    assert len(seen) == 2


def test_a_view_is_always_computed(calls):
    mode, seen = FakeTensorMode(), []

    def view(x):
        seen.append(x)
        return x[:]

    x = fake(mode, 4, 8)
    for _ in range(2):
        got = known_values.result_of("view", view, (x,))
        assert got.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert len(seen) == 2


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_that_are_like_their_input(dtype, grad):
    mode = FakeTensorMode()
    x, w = fake(mode, 4, 6, 8, dtype=dtype, grad=grad), fake(mode, 8, dtype=dtype, grad=not grad)
    norm = F.layer_norm, (x, (8,), w, None, 1e-5)
    for function, args in (norm, (F.silu, (x,)), (F.hardswish, (x, False))):
        made = known_values.like_input(function, args, {})
        assert same_form(made, function(*args)) and made is not x
        with torch.no_grad():
            assert same_form(known_values.like_input(function, args, {}), function(*args))


def test_what_may_be_unlike_its_input_is_run():
    mode = FakeTensorMode()
    x, w = fake(mode, 4, 8), fake(mode, 8, dtype=torch.bfloat16)
    whole = fake(mode, 4, 8, dtype=torch.int64)
    cases = [(F.layer_norm, (x, (8,), w)), (F.silu, (x.t(),)), (F.silu, (x, True))]
    cases += [(F.hardswish, (whole,)), (F.relu, (x,)), (F.silu, (torch.empty(2),))]
    for function, args in cases:
        assert known_values.like_input(function, args, {}) is None
    assert known_values.like_input(F.silu, (x,), {"inplace": True}) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert known_values.like_input(F.layer_norm, (x, (8,)), {}) is None
