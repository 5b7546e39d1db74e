"""Fake tensors, symbolic sizes, graph modules."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch


def register_fake(name: str, lib: torch.library.Library) -> Callable[[Any], Any]:
    """`torch.library.register_fake`, at a fraction of its time.

    Torch 2.11 to 2.14 ask `inspect` for the caller's line and module, which looks at every loaded
    module: for all of our ops a third of the time that importing us takes, at every start.
    """
    from torch._library import utils

    # What `inspect.getmodule` would find out of the call below and keep there.
    getattr(inspect, "modulesbyfile", {}).setdefault(
        os.path.normcase(os.path.abspath(__file__)), __name__
    )

    def register(fake: Any) -> Any:
        code = getattr(fake, "__code__", None)
        where = f"{code.co_filename}:{code.co_firstlineno}" if code else name
        asked = getattr(utils, "get_source", None)
        try:
            if asked is not None:
                setattr(utils, "get_source", lambda stacklevel: where)  # noqa: B010
            torch.library.register_fake(name, fake, lib=lib)
        finally:
            if asked is not None:
                setattr(utils, "get_source", asked)  # noqa: B010
        return fake

    return register


def is_fake(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def new_fake(
    fake_mode: Any,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> torch.Tensor:
    """A fake of its own memory, without the dispatch of a factory op (ten times the time)."""
    meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    new = fake_mode.fake_tensor_converter.from_meta_and_device(fake_mode, meta, device)
    return new.requires_grad_() if requires_grad else new


def plain_dispatch() -> bool:
    """No dispatch mode is active: a tensor that is made is the one that was asked for."""
    return torch._C._len_torch_dispatch_stack() == 0


def count_guards(fake_mode: Any) -> int:
    shape_env = getattr(fake_mode, "shape_env", None)
    return 0 if shape_env is None else len(shape_env.guards)


def size_hint(size: Any, fallback: int = 0) -> int:
    """A dimension's example value, without a guard: an int as it is, a SymInt by its hint."""
    if isinstance(size, int):
        return size
    node = size.node
    hint = getattr(node, "hint", None)
    if hint is not None:
        return int(hint)
    optimization_hint = getattr(node.shape_env, "optimization_hint", None)  # torch >= 2.13
    if optimization_hint is not None:
        return int(optimization_hint(node.expr, fallback=fallback))
    return fallback


def graph_module(root: Any, graph: torch.fx.Graph, class_name: str) -> torch.fx.GraphModule:
    """A GraphModule whose code is made at its first call, as Dynamo's own: for a large graph that
    takes longer than a pass, and most copies are never called."""
    from torch.fx import _lazy_graph_module as lazy

    with lazy._use_lazy_graph_module(True):
        return lazy._make_graph_module(root, graph, class_name=class_name)
