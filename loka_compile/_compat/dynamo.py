"""Dynamo: its graphs as every version writes them, and a compile after it has finished."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from loka_compile._compat.fakes import is_fake


def dynamo_control_flow() -> tuple[type[BaseException], ...]:
    """Exceptions by which the inner compiler asks Dynamo to trace again; they must pass through.

    TensorifyScalarRestartAnalysis, for one, turns float inputs (a norm's eps under dynamic=True)
    into literals on the second trace.
    """
    from torch._dynamo.exc import RestartAnalysis

    return (RestartAnalysis,)


@contextlib.contextmanager
def late_compile(fake_mode: Any) -> Iterator[None]:
    """What a compile needs when it runs after Dynamo has finished: its lock and a fresh context."""
    from torch._dynamo.convert_frame import compile_lock
    from torch._guards import TracingContext
    from torch._guards import tracing
    from torch.utils._python_dispatch import _disable_current_modes

    # The step around us may run under a mode: that of a selective checkpoint would see the ops of
    # our trace, and miss those of the compiler's own.
    with compile_lock, _compiling(), _disable_current_modes(), tracing(TracingContext(fake_mode)):
        yield


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """What Dynamo holds true while it compiles.

    Without it another thread that calls compiled code meanwhile is taken for an FX trace of it.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def real_inputs(gm: torch.fx.GraphModule, inputs: list[Any]) -> list[Any]:
    """`inputs` with real tensors in place of fakes, where Dynamo still holds them.

    DDPOptimizer, on by default, hands fakes of the parameters to the backend.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    found = list(inputs)
    for i, (node, given) in enumerate(zip(placeholders, inputs, strict=False)):
        held = node.meta.get("grapharg")
        if held is not None and is_fake(given):
            real = held.example
            found[i] = real if isinstance(real, torch.Tensor) else given
    return found


def source_name(node: torch.fx.Node) -> str | None:
    """Dynamo's name of a placeholder's source. A property since 2.13, a method before."""
    # A graph that DDPOptimizer split off keeps the source in its meta only.
    source = getattr(node, "_dynamo_source", None) or getattr(
        node.meta.get("grapharg"), "source", None
    )
    if source is None:
        return None
    name = source.name
    return name() if callable(name) else name


#: What Dynamo of torch 2.14 calls for attributes that it read by `getattr` before.
_ATTRIBUTES: dict[Any, str] = {torch.ops.aten.numpy_T: "T", torch.ops.aten.mT: "mT"}


def spell_attributes(graph: torch.fx.Graph) -> None:
    """`x.T` and `x.mT` as every other version's Dynamo writes them."""
    for node in graph.nodes:
        if node.op == "call_function" and len(node.args) == 1 and not node.kwargs:
            name = _ATTRIBUTES.get(node.target)
            if name is not None:
                node.target, node.args = getattr, (node.args[0], name)
