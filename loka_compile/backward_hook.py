"""Hooks on a graph's outputs that run before its backward, under compiled autograd too.

Compiled autograd traces a backward, its hooks with it, and Dynamo can neither enter a lock nor undo
what it did to a set: ours would break the trace, be an error under `fullgraph=True`, and compile
the backward anew at each step that has one. There a hook is one op of ours, `loka::on_backward`,
which finds what to call by the number in its token.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from loka_compile import _compat

_LIBRARY = torch.library.Library("loka", "FRAGMENT")
#: Says that it writes to the token, so that no compiler drops it. It does not. What it calls works
#: on the host: a CUDA graph that took it in would leave it out of every replay.
_LIBRARY.define(
    "on_backward(Tensor gradient, Tensor(a!) token) -> ()", tags=(torch.Tag.cudagraph_unsafe,)
)


class Hook:
    """Calls `call` with the gradient, at each backward through the output it is registered on."""

    def __init__(self, call: Callable[[Tensor], None]) -> None:
        self.call = call
        number = next(_numbers)
        # A number would be part of the traced code.
        self.token = torch.tensor(number, device="cpu")
        _HOOKS[number] = self

    def __call__(self, gradient: Tensor) -> None:
        if torch.compiler.is_dynamo_compiling():
            torch.ops.loka.on_backward(gradient, self.token)
        else:
            self.call(gradient)


_numbers = itertools.count()
#: Autograd holds a hook as long as its backward may come.
_HOOKS: weakref.WeakValueDictionary[int, Hook] = weakref.WeakValueDictionary()


def on_backward(out: Any, call: Callable[[], None]) -> None:
    """`call` before a gradient that reached one of the outputs goes through the graph."""
    hook = None
    for tensor in out if isinstance(out, (list, tuple)) else (out,):
        if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
            hook = hook or Hook(lambda _: call())
            tensor.register_hook(hook)


def _call(gradient: Tensor, token: Tensor) -> None:
    hook = _HOOKS.get(int(token))
    if hook is not None:
        hook.call(gradient)


_LIBRARY.impl("on_backward", _call, "CompositeExplicitAutograd")


@_compat.register_fake("loka::on_backward", _LIBRARY)
def _(gradient, token):
    return None
