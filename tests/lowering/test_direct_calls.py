"""Inductor's code of this backend calls our functions; that of others calls the ops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from loka_compile.ledger import LEDGER
from loka_compile.lowering import direct_calls
from loka_compile.lowering import interaction  # noqa: F401  (defines the op)


def interacting(x: Tensor, p: Tensor) -> Tensor:
    return torch.ops.loka.interaction(x, p, None)[0] + 1


def test_every_op_has_functions_that_take_its_arguments() -> None:
    import inspect

    for op, functions in direct_calls.DIRECT.items():
        count = len(op._schema.arguments)
        for device, function in functions.items():
            assert getattr(op, f"on_{device}") is function
            inspect.signature(function).bind(*range(count))
            assert not (op._schema.is_mutable and op._schema.returns), op
            assert all(r.alias_info is None for r in op._schema.returns), op


@pytest.mark.slow
@pytest.mark.parametrize("ours", [True, False])
def test_whose_code_calls_what(ours) -> None:
    direct_calls.install()
    torch._dynamo.reset()
    x, p = (torch.randn(16, 4, 8, requires_grad=True), torch.randn(4, 2, requires_grad=True))
    wanted = torch.autograd.grad(interacting(x, p).square().sum(), [x, p])
    run = torch.compile(interacting, backend="loka" if ours else "inductor")

    def step() -> list[Tensor]:
        return list(torch.autograd.grad(run(x, p).square().sum(), [x, p]))

    found, codes = run_and_get_code(step)
    text, call = "\n".join(codes), ".on_cpu(" if ours else "("
    for name in ("interaction", "interaction_backward"):
        assert f"torch.ops.loka.{name}.default{call}" in text
        # What the results look like is checked for others only.
        checks = [line for line in text.splitlines() if line.lstrip().startswith("assert_")]
        assert any(f"loka.{name}.default" in line for line in checks) is not ours
    torch.testing.assert_close(found, list(wanted))


@pytest.mark.slow
def test_observers_are_called_directly_and_find_their_state() -> None:
    torch._dynamo.reset()
    model = torch.nn.Linear(32, 32)
    options = {"emulate": True, "mods": "off", "heads": ()}
    run = torch.compile(model, backend="loka", options=options)
    _, codes = run_and_get_code(lambda: run(torch.randn(24, 32)).square().sum().backward())
    text = "\n".join(codes)
    assert text.count("torch.ops.loka.observe.default.on_cpu(") == 2
    assert text.count("torch.ops.loka.observe_coherence.default.on_cpu(") == 1
    held = LEDGER.find(model.weight).statistics
    assert [held[0, role].batches for role in ("x", "g")] == [1, 1]
    assert held[0, "g"].recorded_coherence().shape == (1, 32)
